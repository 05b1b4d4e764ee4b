"""The parts of `benchmarks.papers`: a file a paper, what they measure with, and the page that compares the figures."""
