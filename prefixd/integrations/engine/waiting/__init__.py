"""Waiting requests: what prefixd has of their prompts, and the order in which they go."""
