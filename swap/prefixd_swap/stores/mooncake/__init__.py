"""Objects in a Mooncake Store."""
