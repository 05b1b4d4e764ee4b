"""The parts of `benchmarks.host_share`: a process each, whose CUDA driver costs nothing."""
