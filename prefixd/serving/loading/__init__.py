"""How much of a cached prefix is loaded, and how."""
