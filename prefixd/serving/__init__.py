"""Requests on the daemon's own worker. A sidecar imports none of it."""
