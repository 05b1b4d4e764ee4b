"""Settings for every test."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A slow machine is no defect: no deadline, no complaint. Always the same examples: a failure comes back.
settings.register_profile("prefixd", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("prefixd")

# A script's background jobs ignore SIGINT, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
