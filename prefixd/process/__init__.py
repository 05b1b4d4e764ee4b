"""One process of prefixd: its first steps, its signals, its limits, and the processes that it starts."""
