"""`Admin.Verify` on a live daemon."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixd.cli.machine_checks import check_environment
from prefixd.v1 import admin_pb2
from tests.daemons import Remote

SETTINGS: dict[str, str | int] = {"cpu.bytes": "4MiB", "disk.bytes": "64MiB", "disk.scrub_bytes_per_s": 0}
BLOCK = 3 * 4096 + 5


def flip(folder: Path, content: bytes) -> None:
    """A bit of the slot that begins with `content`."""
    (slab, at) = next((slab, at) for slab in folder.glob("*.slab") if (at := slab.read_bytes().find(content)) >= 0)
    with slab.open("r+b") as file:
        file.seek(at + 7000)
        (byte,) = file.read(1)
        file.seek(at + 7000)
        file.write(bytes([byte ^ 16]))


def verify(remote: Remote) -> tuple[list[admin_pb2.DamagedBlock], admin_pb2.VerifyProgress]:
    damaged: list[admin_pb2.DamagedBlock] = []
    for progress in remote.admin.Verify(admin_pb2.VerifyRequest(), timeout=60):
        damaged += progress.damaged
        last = progress
    assert last.done
    return damaged, last


def test_damage_on_a_live_daemon(launch: Callable[..., Remote], refused: Callable[..., Any]) -> None:
    remote = launch(SETTINGS)
    prompts = [[number, 1, 2, 3, 4, 5, 6, 7] for number in range(20)]
    contents = [bytes([number]) * (2 * BLOCK) for number in range(20)]
    with remote.session() as session:
        space = remote.register(session.session_id, "m", BLOCK)
        for prompt, content in zip(prompts, contents, strict=True):
            remote.put(session.session_id, space, prompt, content, durable=True)
        assert verify(remote)[1].checked_blocks == 40
        flip(remote.daemon.directory / "data/blocks/slabs", contents[3][:BLOCK])
        damaged, last = verify(remote)
        assert (last.damaged_blocks, last.dropped_blocks, last.total_blocks) == (1, 1, 40)
        assert damaged[0].namespace_id == space and "checksum" in damaged[0].reason
        stats = remote.until(lambda stats: any(tier.blocks == 40 for tier in stats.tiers if tier.tier == 3))
        assert stats.lost_blocks == {"checksum mismatch on disk": 1}
        assert (stats.scrub.damaged_blocks, stats.scrub.passes) == (1, 2)
        assert verify(remote)[1].damaged_blocks == 0, "it was written again from memory"
        assert remote.get(session.session_id, space, prompts[3]) == (2, contents[3])


@pytest.mark.slow
def test_without_a_disk_there_is_nothing_to_verify(launch: Callable[..., Remote], refused: Callable[..., Any]) -> None:
    remote = launch({"cpu.bytes": "4MiB", "disk.bytes": 0})
    with refused("FAILED_PRECONDITION", "no disk tier", "disk.bytes"):
        verify(remote)


@pytest.mark.parametrize("setting", ["disk.scrub_bytes_per_s=fast", "disk.scrub_every_s=0"])
@pytest.mark.slow
def test_settings_that_make_no_sense(serve_failing: Callable[..., Any], setting: str) -> None:
    name, _, value = setting.partition("=")
    done = serve_failing({name: value})
    assert done.returncode == 2 and name in done.stderr


@pytest.mark.slow
def test_the_daemon_accounts_for_everything(launch: Callable[..., Remote]) -> None:
    remote = launch(SETTINGS)
    with remote.session() as session:
        space = remote.register(session.session_id, "m", BLOCK)
        remote.put(session.session_id, space, [1, 2, 3, 4], bytes(BLOCK), durable=True)
        found = remote.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest(), timeout=60)
        assert list(found.violations) == []
        assert (found.blocks, found.slots, found.sessions) == (1, 1, 1)


@pytest.mark.slow
def test_doctor_looks_at_the_daemon_behind_the_socket(
    launch: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = launch(SETTINGS)
    entries = Path.iterdir
    # A descriptor that is closed while the daemon's are looked at.
    monkeypatch.setattr(Path, "iterdir", lambda path: itertools.chain([path / "999999"], entries(path)))
    checks = {check.name: check for check in check_environment(remote.daemon.address, remote.stats())}
    assert str(remote.daemon.directory / "data/blocks") in checks["disk space"].found
