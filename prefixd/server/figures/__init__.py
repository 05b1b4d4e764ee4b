"""The daemon's figures: one snapshot, from which `Stats` and the metrics page come."""
