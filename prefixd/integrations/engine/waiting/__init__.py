"""Waiting requests: their cached prefixes, and the order in which the engine begins them."""
