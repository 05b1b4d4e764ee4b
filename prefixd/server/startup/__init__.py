"""What the daemon opens before it serves: device, data directory, tiers, cache. Each is undone by the given stack."""
