"""`prefixd demo`, and daemons of its own as processes, which tests and benchmarks start too."""
