"""An environment that has the wheel of this tree with an extra, and nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from benchmarks.wheels import make_environment


class Environment:
    """Its programs see neither this tree nor the caller's configuration."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        self.folder = folder
        self.python = make_environment(folder, wheel, extra)

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment (`prefixd`, `python`) in its folder."""
        program, *arguments = command
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PREFIXD_", "PYTHON", "XDG_"))
        }
        return subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=self.folder,
            env=environment | {"HOME": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def program(self, text: str, *arguments: str) -> str:
        """What a program in Python prints."""
        done = self.run("python", "-c", text, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout
