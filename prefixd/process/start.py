"""What every process of ours does before anything else: standard descriptors that are open, and paths in UTF-8."""

from __future__ import annotations

import os
import sys
import tempfile
from io import TextIOWrapper
from pathlib import Path


def prepare_process() -> None:
    """Mends what a supervisor may have started us with.

    Descriptors 0 to 2 that are closed are opened on /dev/null. Else the next files get these numbers, and a child's
    messages go where they must not: a worker's stderr was the GPU tier's memory.

    Python that was told to use another encoding than UTF-8 for paths starts again with UTF-8 (`PYTHONUTF8=1`, also for
    its children): gRPC takes no other.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)
    sys.stdin = sys.stdin or _stream(0, "r")
    sys.stdout = sys.stdout or _stream(1, "w")
    sys.stderr = sys.stderr or _stream(2, "w")
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.ignore_environment:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def ensure_temporary_folder(instead: Path) -> None:
    """Where no folder for temporary files can be written to (a container with a read-only root), makes one at `instead`
    and has this process and its children use it: torch and transformers do not start without.

    Raises:
        OSError: it cannot be made.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        instead.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        instead.mkdir(mode=0o700, exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = os.fspath(instead)


def _stream(descriptor: int, mode: str) -> TextIOWrapper:
    return open(descriptor, mode, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[return-value]
