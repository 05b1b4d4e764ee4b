"""Malformed calls, and the statuses that contracts allow."""
