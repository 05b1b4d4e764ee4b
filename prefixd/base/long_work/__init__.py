"""Long work on the event loop, in slices between which other tasks run."""
