"""Clients that load a daemon, and what they check."""
