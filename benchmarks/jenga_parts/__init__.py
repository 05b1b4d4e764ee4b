"""The parts of `benchmarks.jenga`."""
