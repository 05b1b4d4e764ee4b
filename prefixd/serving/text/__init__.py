"""Text to tokens, in a process of their own, and tokens to text."""
