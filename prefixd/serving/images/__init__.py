"""Images of prompts: read, decoded in processes of their own, and cached as keys and values."""
