"""Objects in a Valkey or Redis server or cluster."""
