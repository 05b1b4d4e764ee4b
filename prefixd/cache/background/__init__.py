"""Background work of the cache: write-back, scrubbing, prefetches, forgetting, common blocks."""
