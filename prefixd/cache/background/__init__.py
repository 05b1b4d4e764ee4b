"""What the cache does ahead of need or behind it: writing back, scrubbing, prefetching, forgetting."""
