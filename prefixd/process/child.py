"""A Python module that runs as a process of its own, answers on standard output, and ends with who started it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Runs `python -m NAME PARENT ARGUMENTS...`, whose `main` calls `end_with_parent` first, and waits for its end.

    It is killed when the calling thread ends, and with that when this process does. Ctrl-C does not reach it.

    Raises OSError where the process cannot be started.
    """
    command = [sys.executable, "-m", name, str(os.getpid()), *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, process_group=0, check=False)


def end_with_parent() -> list[str]:
    """`end_with` PARENT, the first argument; returns the others."""
    _, parent, *arguments = sys.argv
    end_with(int(parent))
    return arguments


def end_with(parent: int) -> None:
    """The kernel kills this process with the thread of process `parent` that started it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it ended before
