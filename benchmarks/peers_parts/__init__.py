"""The parts of `benchmarks.peers`: the caches that it compares, the figures that it judges by, the plot."""
