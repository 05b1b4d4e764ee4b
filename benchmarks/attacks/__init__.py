"""Attacks of one client on the others: what `benchmarks.hostile` runs."""
