"""`python -m benchmarks.common.limited LIMIT ARGUMENTS`: `python ARGUMENTS` with a low limit, also for root.

LIMIT is "memory" (it may lock 64 KiB) or "descriptors" (it may have 1,024).
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

LOCKABLE_BYTES = 64 << 10
DESCRIPTORS = 1024

_PR_CAPBSET_DROP = 24
_CAP_IPC_LOCK = 14


def main() -> None:
    """Sets the limit and replaces this process by the other program."""
    limit, *arguments = sys.argv[1:]
    if limit == "descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    else:
        _limit_locked_memory()
    os.execv(sys.executable, [sys.executable, *arguments])


def _limit_locked_memory() -> None:
    """Also drops root's right to exceed the limit: an executed program gets no right outside the bounding set."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOCKABLE_BYTES, hard))
    if os.geteuid() == 0 and ctypes.CDLL(None, use_errno=True).prctl(_PR_CAPBSET_DROP, _CAP_IPC_LOCK, 0, 0, 0):
        sys.exit(f"the right to lock memory cannot be dropped: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
