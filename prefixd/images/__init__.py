"""Checks the images of prompts, counts their tokens and identifies them. Imports neither torch nor transformers."""
