"""Parts of the benchmark of the ghost caches: how near they are to a replay, and what they cost."""
