"""The durable index of the disk tier: its records, and what of it can be believed after a start."""
