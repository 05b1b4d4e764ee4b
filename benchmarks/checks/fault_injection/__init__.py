"""Faults made on purpose, and what is watched meanwhile."""
