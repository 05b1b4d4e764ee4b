"""Tenants of a daemon under test: their quotas and tokens, their load, and what is judged of them."""
