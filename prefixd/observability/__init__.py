"""What the daemon remembers of requests and of evictions, so that a person can be told why a request was slow."""
