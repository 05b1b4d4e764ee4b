"""Frames of the GPU tier that requests need, have and share."""
