"""Settings for every test."""

from __future__ import annotations

from hypothesis import settings

# A slow machine is no defect: no deadline. Always the same examples: a failure comes back.
settings.register_profile("prefixd", deadline=None, derandomize=True)
settings.load_profile("prefixd")
