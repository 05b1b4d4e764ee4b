"""Hosts that share a store: what `benchmarks.remote` and `benchmarks.bit_rot --tier remote` measure and attack."""
