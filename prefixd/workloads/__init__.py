"""Workloads that the demo and the benchmarks send to a real daemon."""
