"""Machines that plans are made for: published figures, or measurements of `prefixd doctor --calibrate`."""
