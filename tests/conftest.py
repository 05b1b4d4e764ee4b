"""Settings for every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A slow machine is no defect: no deadline, no complaint. Always the same examples: a failure comes back.
settings.register_profile("prefixd", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("prefixd")
