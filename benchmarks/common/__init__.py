"""Modules that all benchmarks share."""
