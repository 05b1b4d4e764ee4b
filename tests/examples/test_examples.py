"""The examples run as their pages say."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess

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


def toy_engine(address: str) -> str:
    command = [sys.executable, str(EXAMPLES / "new_engine.py"), "--address", address, "--blocks", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_engine_in_one_file_loads_what_it_has_stored_and_goes_on_without_a_daemon() -> None:
    with DaemonProcess({"cpu.bytes": "4MiB", "disk.bytes": "16MiB"}) as daemon:
        assert toy_engine(daemon.address) == "0 blocks loaded, 8 computed, 8 cached; right: True"
        assert toy_engine(daemon.address) == "7 blocks loaded, 1 computed, 8 cached; right: True"
        address = daemon.address
    assert toy_engine(address) == "0 blocks loaded, 8 computed, 0 cached; right: True"
