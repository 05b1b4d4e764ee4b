"""Slab files and their index: blocks on disk, durable before they are visible."""
