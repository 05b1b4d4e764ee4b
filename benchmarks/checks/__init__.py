"""Checks that pass or fail: each ends with status 2 when a promise was broken."""
