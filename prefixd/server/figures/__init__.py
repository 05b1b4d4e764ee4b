"""The daemon's figures: `Snapshot` collects them, for `Admin.Stats` and for the metrics page."""
