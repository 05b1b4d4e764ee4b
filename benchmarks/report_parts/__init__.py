"""The page that `benchmarks.report` makes of results."""
