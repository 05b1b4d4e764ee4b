"""The disk tier's side of the cache: copies, records of the index, checksums, health, and the restore at the start."""
