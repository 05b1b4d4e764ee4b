"""Ends a process that is not ours together with the one that starts it, even by SIGKILL."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from prefixd.cli.tethered import PR_SET_PDEATHSIG

_TIE = f"""\
import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, 9, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def tied(words: Sequence[str]) -> list[str]:
    """Returns the command that runs `words`, a program and its arguments, so that the kernel kills it when the thread
    that starts it is gone.

    Subprocess's `preexec_fn` would do this in a fork, in which gRPC's handlers run and now and then end it.
    """
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *words]
