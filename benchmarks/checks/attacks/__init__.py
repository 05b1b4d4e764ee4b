"""Attacks of one client on the others: what `benchmarks.checks.hostile` runs."""
