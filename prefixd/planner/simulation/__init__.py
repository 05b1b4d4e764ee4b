"""Tiers and time of a plan: what a machine would take, in a process that has none of it."""
