"""The client deaths harness in short, and proof that it sees what a dead client leaves behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.checks import client_deaths
from benchmarks.common.harness import BenchmarkError
from benchmarks.load.world import Prompt, content
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client

pytestmark = pytest.mark.slow


def test_the_dead_leave_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ["--kills", "12", "--check", "6", "--patience", "60", "--json", str(file)]
    client_deaths.main(arguments)
    result = json.loads(file.read_text())
    broken = ("leaked_slots", "leaked_leases", "left_of_tenants", "failed_calls", "wrong_bytes", "integrity_violations")
    assert (result["kills"], [result[name] for name in broken]) == (12, [0] * 6), result["found"]
    assert result["calls_of_others"] > 100 and result["checks"] == 2


def test_what_a_client_still_has_is_seen() -> None:
    stored, missing = Prompt(0, 0, 1), Prompt(0, 0, 2)
    with (
        DaemonProcess({"cpu.bytes": "4MiB", "disk.bytes": 0}) as daemon,
        Client(daemon.address) as admin,
        Client(daemon.address) as client,
    ):
        assert client_deaths.wait_until_free(admin, 0.0)[:2] == (0, 0)
        cache = client.register(stored.spec)
        cache.store(stored.tokens[: stored.blocks * 16], content(stored))
        with cache.acquire(stored.tokens) as lease, cache.reserve(missing.tokens) as reservation:
            assert client_deaths.wait_until_free(admin, 0.05, [os.getpid()])[:2] == (3, 0)  # the session is one
            leases, nbytes, took = client_deaths.wait_until_free(admin, 0.05)
            assert leases == 2 and took > 0.05
            held = lease.blocks * client_deaths._SLOT_BYTES
            assert nbytes == held + reservation.blocks * missing.spec.block_bytes
        assert client_deaths.wait_until_free(admin, 60.0)[:2] == (0, 0)
        findings = client_deaths.Findings(leaked_bytes=nbytes, leaked_leases=leases)
        assert findings.broken and findings.result()["leaked_slots"] == nbytes / 4096


def test_a_victim_that_ends_by_itself_is_no_death(tmp_path: Path) -> None:
    victim = client_deaths.VictimProcess(f"unix:{tmp_path}/nobody", "lease", 1)
    victim.wait_until_busy()
    victim._process.wait()
    with pytest.raises(BenchmarkError, match=r"a victim \(lease\) ended before it was killed: .*nobody"):
        victim.kill()
