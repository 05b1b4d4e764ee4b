"""Access to the daemon's arena: buffers, copies, leases and reservations; and streams, for clients without it."""
