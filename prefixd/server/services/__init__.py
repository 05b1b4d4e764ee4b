"""The services of the contract: each translates a call into one of the cache, of generation or of the daemon."""
