"""`prefixd recover`: what was set aside is a trouble over restarts until it is brought back or discarded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixd.cli.commands.integrity.doctor import EXIT_DEGRADED
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, NamespaceSpec, PartSpec
from tests.waiting import wait_until

Cli = Callable[..., Any]

BLOCKS, TOKENS, BYTES = 12, 16, 4096
PROMPTS = [[1000 * number + token for token in range(BLOCKS * TOKENS)] for number in range(3)]
KV = [random.Random(number).randbytes(BLOCKS * BYTES) for number in range(3)]
SETTINGS = {"cpu.bytes": "16MiB", "disk.bytes": "32MiB"}
SPEC = NamespaceSpec("model", TOKENS, (PartSpec("kv", 0, BYTES),))


@pytest.fixture
def stopped() -> Iterator[DaemonProcess]:
    """A daemon that has run, with three durable prompts of which one is pinned, and whose index was then cut off."""
    with DaemonProcess(SETTINGS) as daemon:
        with Client(daemon.address) as client:
            cache = client.register(SPEC)
            for tokens, kv in zip(PROMPTS, KV, strict=True):
                cache.store(tokens, kv, durable=True)
            assert client.pin(client.prefixes().prefixes[0].key).durable
        daemon.stop()
        index = daemon.directory / "data" / "blocks" / "index"
        index.rename(index.with_name("index.damaged"))
        yield daemon


def recover(cli: Cli, daemon: DaemonProcess, *more: str) -> dict[str, Any]:
    where = ("--data-dir", str(daemon.directory / "data"), "--set", "disk.bytes=32MiB")
    done = cli("recover", *where, "--json", *more)
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def troubles(client: Client) -> list[str]:
    return [trouble.part for trouble in client.stats().troubles]


@pytest.mark.slow
def test_lost_blocks_are_a_trouble_until_they_are_back(cli: Cli, stopped: DaemonProcess) -> None:
    for _ in range(2):  # also after one more restart
        stopped.start()
        with Client(stopped.address) as client:
            assert troubles(client) == ["disk index"]
            assert client.stats().lost_blocks["in an index that was set aside"] == 3 * BLOCKS
            assert client.register(SPEC).match(PROMPTS[0]).blocks == 0
        assert cli("doctor", "--address", stopped.address).exit_code == EXIT_DEGRADED
        refused = cli("recover", "--data-dir", str(stopped.directory / "data"))
        assert refused.exit_code == 1 and "stop the daemon before you recover" in refused.output
        stopped.stop()
    found = recover(cli, stopped, "--dry-run")
    assert found["dry_run"] and found["indexes"][0]["brought_back_blocks"] == 3 * BLOCKS
    assert recover(cli, stopped)["indexes"] == [{**found["indexes"][0], "brought_back_blocks": 3 * BLOCKS}]
    assert recover(cli, stopped)["indexes"] == []
    stopped.start()
    with Client(stopped.address) as client:
        assert troubles(client) == [] and not client.stats().lost_blocks
        cache = client.register(SPEC)
        for tokens, kv in zip(PROMPTS, KV, strict=True):
            into = bytearray(len(kv))
            assert cache.load(tokens, into) == BLOCKS and bytes(into) == kv
        assert [prefix.pinned for prefix in client.prefixes().prefixes].count(True) == 1
        assert not client.check_integrity().violations
    assert cli("doctor", "--address", stopped.address).exit_code == 0


@pytest.mark.slow
def test_a_running_daemon_sees_that_it_was_discarded(cli: Cli, stopped: DaemonProcess) -> None:
    stopped.start()
    with Client(stopped.address) as client:
        assert troubles(client) == ["disk index"]
        assert recover(cli, stopped, "--discard")["indexes"][0]["lost_blocks"] == {"discarded": 3 * BLOCKS}
        wait_until(lambda: not troubles(client), lambda: str(troubles(client)))
        assert not client.stats().lost_blocks


def test_a_folder_without_a_disk_tier_is_not_one_where_all_is_well(cli: Cli, tmp_path: Path) -> None:
    done = cli("recover", "--data-dir", str(tmp_path / "mistyped"))
    assert done.exit_code == 2 and not done.stdout
    assert f"no disk tier in {tmp_path / 'mistyped' / 'blocks'}; give the same" in done.stderr


def test_there_is_nothing_to_recover(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "data" / "blocks").mkdir(parents=True)
    done = cli("recover", "--data-dir", str(tmp_path / "data"))
    assert done.exit_code == 0 and "No index was set aside" in done.stdout
    assert not list((tmp_path / "data" / "blocks").iterdir())


def test_another_formats_directory_is_refused_in_a_line(cli: Cli, tmp_path: Path) -> None:
    disk = tmp_path / "data" / "blocks"
    (disk / "index.damaged").mkdir(parents=True)
    done = cli("recover", "--data-dir", str(tmp_path / "data"))
    assert done.exit_code == 1 and "has no superblock but holds 'index.damaged'" in done.output


def test_two_ways_at_once_are_refused(cli: Cli, tmp_path: Path) -> None:
    done = cli("recover", "--data-dir", str(tmp_path), "--dry-run", "--discard")
    assert done.exit_code == 2 and "exclude each other" in done.output
