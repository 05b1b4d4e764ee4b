"""The memory of keys, values and states in the daemon's frames."""
