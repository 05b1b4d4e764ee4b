"""`prefixd doctor`: what adds up, what does not, and what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixd.cli import host_checks, machine_checks
from prefixd.cli.commands.integrity import doctor
from prefixd.cli.output.tables import answer_tables
from prefixd.settings import Settings
from prefixd.v1 import admin_pb2, cache_pb2

Cli = Callable[..., Any]


def test_what_adds_up_and_what_is_in_trouble(cli: Cli, daemon: Any) -> None:
    done = cli("doctor", "--address", daemon.address)
    assert done.exit_code == doctor.EXIT_DEGRADED, "a trouble is not a violation"
    for words in (
        "ok everything adds up: 4,096 blocks, 512 slots in memory, 1 sessions, 3 leases, 0 reservations",
        "blocks held by: lease 12-ab (4,000), write-back (7)",
        "trouble for 0:01:30: disk tier: the disk is full\n  free some space\n",
        "file descriptors: a process may have",
        "memory mappings: a process may have",
    ):
        assert words in done.stdout


def test_keys_of_blocks_on_disk_come_with_the_settings_that_name_their_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = ["disk.encryption_key_file", "tenants.acme.encryption_key_file"]
    keys = [
        admin_pb2.DiskKey(key="1f3a09bc", blocks=12, nbytes=1 << 20, encrypts=True, settings=files),
        admin_pb2.DiskKey(key="00000007", blocks=1, nbytes=1 << 20),
        admin_pb2.DiskKey(blocks=2, nbytes=1 << 20),
    ]
    answer_tables.print_diagnosis(admin_pb2.CheckIntegrityResponse(disk_keys=keys), [])
    out = " ".join(capsys.readouterr().out.split())
    assert f"blocks on disk under key 1f3a09bc ({', '.join(files)}): 12, 1.0 MiB, which encrypts what is" in out
    assert "under key 00000007: 1, 1.0 MiB" in out and "in clear: 2, 1.0 MiB" in out


def test_a_violation_has_a_status_of_its_own(cli: Cli, daemon: Any) -> None:
    daemon.damage = True
    done = cli("doctor", "--address", daemon.address)
    assert done.exit_code == doctor.EXIT_VIOLATED
    assert "does not add up" in done.stdout and "\n  cpu tier: slots with several owners: 4096\n" in done.stdout


def test_all_is_well_is_status_0_until_a_worker_was_given_up(cli: Cli, daemon: Any) -> None:
    daemon.troubles = False
    assert cli("doctor", "--address", daemon.address).exit_code == 0
    daemon.worker_error = "gpu.bytes = 1 holds 0 frames"
    for arguments in ([], ["--json"]):
        assert cli("doctor", *arguments, "--address", daemon.address).exit_code == doctor.EXIT_DEGRADED


def test_an_index_that_was_set_aside_is_degraded(cli: Cli, daemon: Any) -> None:
    daemon.set_aside = True
    done = cli("doctor", "--address", daemon.address)
    assert done.exit_code == doctor.EXIT_DEGRADED
    assert "40 blocks are lost" in done.stdout and "prefixd recover" in done.stdout


def test_without_a_daemon_the_host_is_checked(cli: Cli) -> None:
    done = cli("doctor", "--set", "cpu.bytes=64MiB")
    assert done.exit_code == doctor.EXIT_NO_DAEMON and "no answer from the daemon" in done.stderr
    for words in ("ok configuration: no file", "ok packages: ", "memory: the daemon needs 160.0 MiB", "kernel: linux"):
        assert words in done.stdout
    plain = cli("doctor", "--json")
    assert plain.exit_code == doctor.EXIT_NO_DAEMON
    found = json.loads(plain.stdout)
    assert found["error"]["status"] == "UNAVAILABLE" and "prefixd serve" in found["error"]["remedy"]
    assert {check["name"] for check in found["environment"]} >= {"configuration", "disk", "direct I/O", "kernel"}
    elsewhere = cli("doctor", "--address", "127.0.0.1:1")
    assert elsewhere.exit_code == doctor.EXIT_NO_DAEMON and not elsewhere.stdout


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("cpu.bytes=900TB", "configuration: no file, the defaults are used; a daemon would not start: cpu.bytes = "),
        ("disk.bytes=900TB", "free space there, lower disk.bytes by"),
        ("worker.model=/no/model", "worker.model = /no/model is not a directory"),
        ("disk.encryption_key_file=/no/keys", "would not start: disk.encryption_key_file = /no/keys: No such file"),
        ("cache.eviction=best", "configuration: cache.eviction"),
    ],
)
def test_a_host_that_does_not_suit_has_remedies(cli: Cli, given: str, words: str) -> None:
    done = cli("doctor", "--host", "--set", given)
    assert done.exit_code == doctor.EXIT_DEGRADED and words in done.stdout


@pytest.mark.parametrize(("kind", "word"), [("tmpfs", "this is memory"), ("nfs4", "choose a local disk")])
def test_a_disk_tier_in_the_wrong_place(tmp_path: Path, kind: str, word: str) -> None:
    device = tmp_path.stat().st_dev
    (tmp_path / "proc/self").mkdir(parents=True)
    mount = f"29 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {kind} x rw\n"
    (tmp_path / "proc/self/mountinfo").write_text(mount)
    settings = Settings.load(None, {"data_dir": tmp_path, "cpu.bytes": "1MiB", "disk.bytes": "1MiB"})
    checks = {check.name: check for check in host_checks.check_host(settings, None, tmp_path)}
    assert kind in checks["disk"].found and word in checks["disk"].remedy


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
