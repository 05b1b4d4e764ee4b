"""What is known of requests: explains why one was late, and records their prompts as a trace."""
