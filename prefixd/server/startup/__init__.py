"""Opens the device, the data directory, the tiers and the cache before the daemon serves; a stack closes each again."""
