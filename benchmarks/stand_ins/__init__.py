"""Stand-ins for hardware: a slow network, a slow bus, a disk that obeys, a device that daemons share."""
