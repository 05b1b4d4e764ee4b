"""First steps, signals and limits of each process of prefixd, and the processes that it starts."""
