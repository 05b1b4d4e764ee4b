"""The doors: listeners, messages as they arrive, errors as status codes, health, and the memory socket."""
