"""Real engines under a benchmark."""
