"""Images of prompts: checked, counted in tokens, and told apart. Imports neither torch nor transformers."""
