"""The durable index of the disk tier: its records, and their recovery at a start."""
