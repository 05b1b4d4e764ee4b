"""Hosts that share a store: measured by `benchmarks.remote`, attacked by `benchmarks.checks.bit_rot --tier remote`."""
