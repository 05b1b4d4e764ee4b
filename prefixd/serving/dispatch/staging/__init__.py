"""Brings the cached prefixes of the next requests to the GPU tier: which ones, how much of each, and when."""
