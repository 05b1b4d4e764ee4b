"""What the daemon and its worker say to each other: messages, settings and errors."""
