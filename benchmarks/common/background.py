"""A process that takes only what processor time others leave: one that stands for somebody on another machine."""

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
    with suppress(OSError):  # no such thing here
        Path("/proc/self/autogroup").write_text(str(niceness), encoding="ascii")
