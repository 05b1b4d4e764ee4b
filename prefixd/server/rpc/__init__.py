"""The door: messages as they arrive, limits of calls, errors as status codes, and health."""
