"""Commands that show why requests are slow, and what would help."""
