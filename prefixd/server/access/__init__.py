"""Identifies callers, and controls access to the sockets, tokens and the audit log."""
