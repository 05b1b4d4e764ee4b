"""`python -m benchmarks.common.limited ARGUMENTS`: `python ARGUMENTS` that may lock hardly any memory, root or not."""

from __future__ import annotations

import ctypes
import os
import resource
import sys

LOCKABLE_BYTES = 64 << 10

_PR_CAPBSET_DROP = 24
_CAP_IPC_LOCK = 14


def main() -> None:
    """Becomes the other program: a right that is not in the bounding set is not given to what root executes."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOCKABLE_BYTES, hard))
    if os.geteuid() == 0 and ctypes.CDLL(None, use_errno=True).prctl(_PR_CAPBSET_DROP, _CAP_IPC_LOCK, 0, 0, 0):
        sys.exit(f"the right to lock memory cannot be dropped: {os.strerror(ctypes.get_errno())}")
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
