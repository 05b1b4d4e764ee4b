"""Moving blocks between tiers, and making room for them."""
