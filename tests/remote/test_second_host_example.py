"""The example of a second host runs as its page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.remote.valkey_server import ValkeyServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "second_host.py"


def test_the_second_host_finds_what_the_first_one_has_computed(shared_valkey: ValkeyServer) -> None:
    command = [sys.executable, str(EXAMPLE), "--store", f"valkey://127.0.0.1:{shared_valkey.port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("the second host")
    assert "REMOTE" not in first and "REMOTE" in second
    same, found = done.stdout.splitlines()[-1].split("; ")
    assert same == "same answers: True" and int(found.split()[0]) > 200
