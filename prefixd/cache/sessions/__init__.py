"""Sessions of clients with their leases, reservations and pins, and quarantine for the slots of ended reservations."""
