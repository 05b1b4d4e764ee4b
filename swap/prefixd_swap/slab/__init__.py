"""Slab files and their index: blocks on disk, durable before anybody sees them."""
