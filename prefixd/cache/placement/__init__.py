"""What lies where, whose it is, what holds it there, and how long it should stay."""
