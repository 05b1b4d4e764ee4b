"""Checks that the data structures of the cache agree with each other (`check_integrity`)."""
