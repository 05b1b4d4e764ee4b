"""Lowers the priority of a process that stands for another host, so that it takes only CPU time that is left."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LOWEST_PRIORITY = 19


def step_back(niceness: int = LOWEST_PRIORITY) -> None:
    """Gives this process a lower priority against all others of the machine.

    Linux with autogroups shares the processor between sessions first, whatever the niceness in them: a process that has
    a session of its own (`Companion`) has to make its session nice, too.
    """
    os.nice(niceness)
    with suppress(OSError):  # this kernel has no autogroups
        Path("/proc/self/autogroup").write_text(str(niceness), encoding="ascii")
