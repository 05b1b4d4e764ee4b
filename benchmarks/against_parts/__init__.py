"""The parts of `benchmarks.against`."""
