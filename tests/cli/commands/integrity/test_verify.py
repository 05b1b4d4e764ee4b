"""`prefixd verify`: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import grpc

KEY = "9f86d081884c7d659a2feaa0c55ad015"
Cli = Callable[..., Any]


def test_all_in_order_is_one_line_and_status_0(cli: Cli, daemon: Any) -> None:
    done = cli("verify", "--address", daemon.address)
    assert done.exit_code == 0
    assert done.stdout.startswith("4,000 blocks, 2.0 GiB in ")
    assert done.stdout.endswith("all in order\n") and done.stdout.count("\n") == 1


def test_damage_is_listed_and_status_1(cli: Cli, daemon: Any) -> None:
    daemon.damage = True
    done = cli("verify", "--address", daemon.address)
    assert done.exit_code == 1
    for words in (KEY, "slot 3: checksum", "1 damaged", "with 2 that continued them"):
        assert words in done.stdout


def test_as_json(cli: Cli, daemon: Any) -> None:
    daemon.damage = True
    done = cli("verify", "--json", "--address", daemon.address)
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["checked_blocks"], found["damaged_blocks"], found["dropped_blocks"], found["done"]) == (
        4000,
        1,
        3,
        True,
    )
    assert [block["key"] for block in found["damaged"]] == [KEY]


def test_a_refusal_is_one_line(cli: Cli, daemon: Any) -> None:
    daemon.failure = (grpc.StatusCode.FAILED_PRECONDITION, "there is no disk tier to verify")
    done = cli("verify", "--address", daemon.address)
    assert (done.exit_code, done.stderr) == (1, "prefixd: there is no disk tier to verify\n")


def test_ctrl_c_ends_it_here_and_there(daemon: Any) -> None:
    daemon.endless = True
    with subprocess.Popen(
        [sys.executable, "-m", "prefixd", "verify", "--address", daemon.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ,
    ) as process:
        assert daemon.asked.wait(60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")
    assert daemon.cancelled.wait(60)
