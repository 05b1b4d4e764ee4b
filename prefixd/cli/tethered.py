"""`python -m prefixd.cli.tethered PARENT serve ...`: the command line, which ends when process PARENT does.

The kernel sends SIGTERM when the thread that started this process ends, even if SIGKILL ended it. So a daemon never
outlives the demo, benchmark or test that started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefixd_swap import FileOps

PR_SET_PDEATHSIG = 1


def main(ops: FileOps | None = None) -> None:
    """Ties this process to its parent and runs the command line; `ops` as for `prefixd.cli.main`."""
    from prefixd.cli import main as prefixd

    parent = int(sys.argv.pop(1))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(f"prefixd: process {parent}, for which this daemon was started, has ended")
    prefixd(ops)


if __name__ == "__main__":
    main()
