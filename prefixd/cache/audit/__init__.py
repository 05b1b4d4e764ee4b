"""Checks that what the cache knows in several places agrees (`check_integrity`)."""
