"""Tenants, their quotas and their turns."""
