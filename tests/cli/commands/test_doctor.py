"""`prefixd doctor`: what adds up, what does not, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixd.cli import machine_checks
from prefixd.cli.commands import doctor
from prefixd.server.startup import set_aside_index
from prefixd.v1 import admin_pb2, cache_pb2

Cli = Callable[..., Any]


def test_what_adds_up_and_what_is_in_trouble(cli: Cli, daemon: Any) -> None:
    done = cli("doctor", "--address", daemon.address)
    assert done.exit_code == 0, "a trouble is not a violation"
    for words in (
        "ok everything adds up: 4,096 blocks, 512 slots in memory, 1 sessions, 3 leases, 0 reservations",
        "blocks held by: lease 12-ab (4,000), write-back (7)",
        "trouble for 0:01:30: disk tier: the disk is full\n  free some space\n",
        "file descriptors: a process may have",
        "memory mappings: a process may have",
    ):
        assert words in done.stdout


def test_a_violation_is_status_1(cli: Cli, daemon: Any) -> None:
    daemon.damage = True
    done = cli("doctor", "--address", daemon.address)
    assert done.exit_code == 1
    assert "does not add up" in done.stdout and "\n  cpu tier: slots with several owners: 4096\n" in done.stdout


def test_a_worker_that_was_given_up_is_status_1(cli: Cli, daemon: Any) -> None:
    daemon.worker_error = "gpu.bytes = 1 holds 0 frames"
    assert cli("doctor", "--address", daemon.address).exit_code == 1
    assert cli("doctor", "--json", "--address", daemon.address).exit_code == 1


def test_an_index_that_was_set_aside_is_status_1(cli: Cli, daemon: Any) -> None:
    daemon.set_aside = True
    done = cli("doctor", "--address", daemon.address)
    assert done.exit_code == 1 and "40 blocks are lost" in done.stdout and "prefixd recover" in done.stdout
    assert cli("doctor", "--json", "--address", daemon.address).exit_code == 1


def test_doctor_knows_the_troubles_name() -> None:
    assert doctor.SET_ASIDE == set_aside_index.PART


def test_as_json(cli: Cli, daemon: Any) -> None:
    found = json.loads(cli("doctor", "--json", "--address", daemon.address).stdout)
    assert (found["violations"], found["blocks"], found["troubles"][0]["part"]) == ([], 4096, "disk tier")
    assert {check["name"] for check in found["environment"]} >= {"file descriptors", "locked memory"}


def tier(kind: Any, capacity: int) -> admin_pb2.TierStats:
    return admin_pb2.TierStats(tier=kind, capacity_bytes=capacity)


def test_limits_and_sizes_that_do_not_fit_come_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stats = admin_pb2.StatsResponse(tiers=[tier(cache_pb2.TIER_CPU, 1 << 60), tier(cache_pb2.TIER_DISK, 1 << 60)])
    monkeypatch.setattr(
        machine_checks, "_read_limits", lambda pid: {"Max open files": "256", "Max locked memory": "65536"}
    )
    monkeypatch.setattr(machine_checks, "_find_disk_path", lambda pid: tmp_path)
    checks = {check.name: check for check in machine_checks.check_environment("unix:/nowhere", stats)}
    assert "ulimit -n" in checks["file descriptors"].remedy and "256" in checks["file descriptors"].found
    assert "cpu.bytes" in checks["shared memory"].remedy
    assert "lower disk.bytes" in checks["disk space"].remedy and str(tmp_path) in checks["disk space"].found


def test_what_is_as_it_should_be_needs_no_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stats = admin_pb2.StatsResponse(tiers=[tier(cache_pb2.TIER_CPU, 1 << 20), tier(cache_pb2.TIER_DISK, 1)])
    monkeypatch.setattr(machine_checks, "_read_limits", lambda pid: {"Max open files": "65536"})
    monkeypatch.setattr(machine_checks, "_find_disk_path", lambda pid: tmp_path)
    checks = machine_checks.check_environment("localhost:1", stats)
    assert {check.name: check.remedy for check in checks if check.name != "memory mappings"} == {
        "file descriptors": "",
        "locked memory": "",
        "shared memory": "",
        "control group": "",
        "disk space": "",
    }
