"""The examples run as their pages say."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
WITHOUT_DAEMON = EXAMPLES / "generate_with_vattention.py"
# In the example's process every import of the daemon's packages fails.
_ALONE = """
import runpy, sys
sys.modules |= dict.fromkeys(["prefixd", "prefixd_scheduler", "grpc"])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _ALONE, str(WITHOUT_DAEMON), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_generation_without_the_daemon_gives_the_models_own_tokens() -> None:
    done = run("--new-tokens", "20")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "same tokens as model.generate: True"
    texts = [ast.literal_eval(line) for line in lines[:3]]
    assert all(len(text) == 20 for text in texts)
    assert "KvCacheStats(mapped=" in done.stdout and "blocks of 16 tokens" in done.stdout


def test_generation_without_the_daemon_has_help_and_is_short() -> None:
    done = run("--help")
    assert done.returncode == 0 and "--new-tokens" in done.stdout, done.stderr
    lines = [line.strip() for line in WITHOUT_DAEMON.read_text().splitlines()]
    assert sum(bool(line) and not line.startswith("#") for line in lines) < 60
