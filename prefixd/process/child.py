"""Runs a Python module as a child process, which answers on standard output and ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Runs `python -m NAME PARENT ARGUMENTS...` and waits for its end. The module calls `end_with_parent` first.

    The kernel kills it when the calling thread, or this process, ends. Ctrl-C does not reach it.

    Raises OSError if the process cannot be started.
    """
    command = [sys.executable, "-m", name, str(os.getpid()), *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, process_group=0, check=False)


def end_with_parent() -> list[str]:
    """Calls `end_with` with PARENT, the first argument of the command line; returns the other arguments."""
    _, parent, *arguments = sys.argv
    end_with(int(parent))
    return arguments


def end_with(parent: int) -> None:
    """Makes the kernel kill this process when the thread of process `parent` that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent has ended already
