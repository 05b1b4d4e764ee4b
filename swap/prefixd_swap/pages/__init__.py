"""Large pages that are cut into slots of any size (Jenga, section 4)."""
