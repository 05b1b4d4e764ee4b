"""What the parts measure on: a device, its memory, a model there; and what a part is."""
