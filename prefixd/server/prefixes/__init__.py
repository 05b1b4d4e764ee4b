"""Prefixes that operators name by key or by prompt: lists, describes and warms them."""
