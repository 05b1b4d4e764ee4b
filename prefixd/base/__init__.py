"""Foundations of all other packages: errors, sizes, clocks, tenants and fairness between them. Imports none of them."""
