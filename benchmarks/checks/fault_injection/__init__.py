"""Faults made on purpose, and checks of the daemon's reports during them."""
