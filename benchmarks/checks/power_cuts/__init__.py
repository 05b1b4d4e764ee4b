"""A disk whose power is cut at any point, and what the store must have afterwards."""
