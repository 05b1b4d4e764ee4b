"""Who calls, what they may, and how much of the daemon each may use at once."""
