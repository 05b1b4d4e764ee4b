"""A process that is tied to another one ends with it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.common.tie import tied
from tests.waiting import wait_until

_PARENT = """
import subprocess, sys
from benchmarks.common.tie import tied
process = subprocess.Popen(tied(["sleep", "600"]))
print(process.pid, flush=True)
sys.stdin.read()
"""


def test_the_command_runs_under_the_same_id_and_ends_with_who_started_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None and parent.stdout is not None
    with parent.stdin, parent.stdout:
        child = Path("/proc") / parent.stdout.readline().strip()
        wait_until(lambda: (child / "cmdline").read_bytes() == b"sleep\x00600\x00")
        parent.kill()
        parent.wait()
    with suppress(FileNotFoundError, ProcessLookupError):  # whoever is its parent now has waited for it
        wait_until(lambda: (child / "stat").read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.slow
def test_what_a_command_says_and_its_status_are_its_own() -> None:
    ran = subprocess.run(tied(["sh", "-c", "echo $0 $1; exit 3", "a b", "c"]), capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "a b c\n", "")
