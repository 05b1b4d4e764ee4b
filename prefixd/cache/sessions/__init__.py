"""What clients hold: sessions with leases, reservations and pins; and quarantine for the slots of those that died."""
