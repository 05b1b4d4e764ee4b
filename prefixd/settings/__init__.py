"""The settings: the tree with its defaults, where values come from, and what must be true of them together."""
