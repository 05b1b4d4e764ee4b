"""Keys of blocks, and the index that finds a row by its key."""
