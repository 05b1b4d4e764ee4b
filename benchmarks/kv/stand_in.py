"""A process whose CUDA driver is the tests' stand-in: for tests, and for what is counted rather than timed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.common.harness import BenchmarkError

_SOURCE = Path(__file__).resolve().parents[2] / "tests" / "swap" / "stand_in" / "libcuda.c"
_FLAGS = ("-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1")


def stand_in_environment(folder: Path) -> dict[str, str]:
    """Compile the stand-in into `folder`; the environment of a process that finds it as the driver.

    Raises BenchmarkError without a C compiler.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise BenchmarkError("there is no C compiler to build the stand-in driver with; install gcc")
    command = [compiler, *_FLAGS, "-o", str(folder / "libcuda.so.1"), str(_SOURCE)]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode != 0:
        raise BenchmarkError(f"the stand-in driver does not compile: {built.stderr.strip()[-300:]}")
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "CUDA_VISIBLE_DEVICES": "",
    }
