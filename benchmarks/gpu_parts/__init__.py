"""The parts of `benchmarks.gpu`, one question a file."""
