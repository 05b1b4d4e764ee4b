"""The commands, a file a subject."""
