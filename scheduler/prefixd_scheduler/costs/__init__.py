"""Learned durations, and decisions by them: load or compute, and how far to look ahead."""
