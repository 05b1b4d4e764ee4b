"""Threads that compute for one caller take what processor time the event loop and the others leave."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

_NICENESS = 10


def step_back() -> None:
    """Gives the thread that calls this a lower priority than the process's others, where threads have one of their
    own."""
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
