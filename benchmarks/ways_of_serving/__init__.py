"""The ways of serving that benchmarks compare: their daemons, progress and figures."""
