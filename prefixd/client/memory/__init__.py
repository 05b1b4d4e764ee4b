"""The daemon's arena as this process sees it: buffers, copies, leases and reservations."""
