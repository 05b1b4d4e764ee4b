"""What a model needs, found by looking at its configuration and by running it once on meta tensors."""
