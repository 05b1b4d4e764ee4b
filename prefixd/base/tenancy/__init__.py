"""Tenants, and how they take turns."""
