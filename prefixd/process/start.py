"""The first steps of every process of prefixd: it opens the standard descriptors and switches paths to UTF-8."""

from __future__ import annotations

import os
import sys
import tempfile
from io import TextIOWrapper
from pathlib import Path


def prepare_process() -> None:
    """Repairs descriptors and encoding that a supervisor may have set.

    Opens those of the descriptors 0 to 2 that are closed on /dev/null. Otherwise the next files get these numbers, and
    a child's messages go into them: a worker's stderr was the GPU tier's memory.

    If Python uses another encoding than UTF-8 for paths, it starts again with UTF-8 (`PYTHONUTF8=1`, also for its
    children): gRPC accepts no other.
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
    """Makes a folder for temporary files at `instead`, for this process and its children, if no other one is writable
    (a container with a read-only root): torch and transformers do not start without one.

    Raises:
        OSError: the folder cannot be made.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        instead.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        instead.mkdir(mode=0o700, exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = os.fspath(instead)


def _stream(descriptor: int, mode: str) -> TextIOWrapper:
    return open(descriptor, mode, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[return-value]
