"""What an installation of prefixd takes on disk: its wheel, and a fresh environment with each extra."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import harness

DESCRIPTION = """\
Builds the wheel, installs it into fresh environments (with nothing, [daemon], [worker]; the packages are those of
constraints.txt), and counts the bytes of their files, without compiled modules and without pip. Which build of torch
[worker] gets is up to the package index; torch says which it was."""

ROOT = Path(__file__).resolve().parents[1]
_PIP: tuple[str | Path, ...] = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--retries", "2")
_EXTRAS = {"client": "", "daemon": "daemon", "worker": "worker"}


def build_wheel(folder: Path, source: Path = ROOT) -> Path:
    """Builds the wheel of a tree, by default this one, into `folder`. Raises BenchmarkError."""
    _run([*_PIP, "wheel", "--no-deps", "--wheel-dir", folder, source])
    (wheel,) = folder.glob("prefixd-*.whl")
    return wheel


def make_environment(folder: Path, wheel: Path, extra: str = "") -> Path:
    """Makes an environment in `folder` with the wheel and what an extra brings; returns its Python.

    Raises BenchmarkError where the packages cannot be had.
    """
    _run([sys.executable, "-m", "venv", "--without-pip", folder])
    python = folder / "bin" / "python"
    wanted = f"prefixd[{extra}] @ {wheel.as_uri()}"
    pip = [*_PIP, "--python", python, "install", "--no-compile", "--constraint", ROOT / "constraints.txt"]
    _run([*pip, wanted])
    return python


def size_of(folder: Path) -> int:
    """Bytes of the files in `folder`; a link counts nothing."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files if path.suffix != ".pyc")


def measure(folder: Path) -> dict[str, object]:
    """The result; `folder` has room for all environments."""
    wheel = build_wheel(folder)
    sizes: dict[str, int] = {}
    with harness.progress("environments", len(_EXTRAS)) as step:
        for name, extra in _EXTRAS.items():
            python = make_environment(folder / name, wheel, extra)
            sizes[name] = size_of(folder / name)
            step()
    torch = _run([python, "-c", "from importlib.metadata import version; print(version('torch'))"]).strip()
    return {"wheel_bytes": wheel.stat().st_size, "environments": sizes, "torch": torch}


def _run(command: Sequence[str | Path]) -> str:
    # The caller's prefixd, and requirements that the caller's pip is told of elsewhere, are not the environment's.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise harness.BenchmarkError(f"{Path(command[0]).name} {' '.join(map(str, command[1:4]))} failed: {said[-1]}")
    return done.stdout


@harness.benchmark("wheels", DESCRIPTION)
def main(options: harness.Options) -> harness.Outcome:
    """The sizes."""
    with tempfile.TemporaryDirectory(prefix="prefixd-wheels-") as folder:
        return harness.Outcome(measure(Path(folder)))


if __name__ == "__main__":
    harness.run(main)
