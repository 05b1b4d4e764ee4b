"""Codecs: fewer bytes for a part of a block, in tiers that are read and written by calls."""
