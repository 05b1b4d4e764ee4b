"""The clock that measures ages: of leases, credentials, sessions, retention requests and waiting requests; and the time
in which a thread waits for a CPU."""

from __future__ import annotations

import secrets
import time
from functools import partial
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SCHEDULING = Path("/proc/thread-self/schedstat")


elapsed_s = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
"""Returns the seconds since this host was started, including those asleep; equal for all processes of the host.

This clock (CLOCK_BOOTTIME) cannot be set, while the wall clock may jump by a day at any moment. It begins at 0 when the
host starts, so ages that span a restart of the host must not be measured by it.
"""


def cpu_wait_s() -> float:
    """Returns the seconds in which this thread was ready and had no CPU; 0 if the kernel does not say."""
    try:
        return int(_SCHEDULING.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def boot_id() -> bytes:
    """Returns the id of the host's start from which `elapsed_s` counts: 36 bytes, random if there is no /proc."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return secrets.token_hex(18).encode()
