"""One request, from its arrival to its last token, and its runs on the worker."""
