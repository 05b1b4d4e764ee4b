"""Copies between an engine's KV cache and the daemon's memory."""
