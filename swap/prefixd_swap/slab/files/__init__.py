"""Slab files: their slots, and the calls that read and write them."""
