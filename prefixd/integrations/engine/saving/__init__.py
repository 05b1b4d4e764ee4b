"""Which blocks are saved, and when."""
