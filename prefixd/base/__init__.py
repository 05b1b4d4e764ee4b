"""Foundations of all other packages: errors, sizes, clocks, tenants and their fair turns. Imports none of them."""
