"""The clock by which ages are measured: of leases, tickets, sessions, wishes, and of requests that wait."""

from __future__ import annotations

import secrets
import time
from functools import partial
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


elapsed_s = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
"""Seconds since this host was started, those asleep included: the same for all processes of the host.

Nobody sets this clock (CLOCK_BOOTTIME), while the wall clock may be set by a day at any moment. It begins anew when the
host does: what outlives that must not be measured by it.
"""


def boot_id() -> bytes:
    """Which start of the host `elapsed_s` counts from: 36 bytes; random ones where there is no /proc."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return secrets.token_hex(18).encode()
