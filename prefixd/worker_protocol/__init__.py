"""The protocol between the daemon and its worker: messages, settings and errors."""
