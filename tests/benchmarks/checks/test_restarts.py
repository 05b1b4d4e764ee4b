"""The harness of restarts in short, and proof that it sees: blocks and pins that are gone, and what comes back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import lmdb
import pytest

from benchmarks.checks import restarts

pytestmark = pytest.mark.slow


def test_restarts_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    restarts.main(["--steps", "240", "--restarts", "16", "--json", str(file)])
    result = json.loads(file.read_text())
    broken = ("lost_blocks", "lost_pins", "lost_durable", "resurrected", "wrong_bytes", "failed")
    assert (result["steps"], result["restarts"]) == (240, 16)
    assert [result[name] for name in broken] == [0] * 6, result["found"]
    assert result["compared_blocks"] > 100 and result["durable_prompts"] > 10 and result["verified_bytes"] > 1e5


async def test_blocks_that_are_gone_after_a_restart_are_found_out() -> None:
    findings = await restarts.run(40, 4, 0, between=shutil.rmtree)
    assert findings.lost_blocks > 0 and findings.lost_durable > 0 and findings.broken


async def test_pins_that_are_gone_after_a_restart_are_found_out() -> None:
    def unpin(disk: Path) -> None:
        with lmdb.open(str(disk / "index"), max_dbs=3, lock=False) as env, env.begin(write=True) as txn:
            txn.drop(env.open_db(b"pins", txn=txn), delete=False)

    findings = await restarts.run(120, 4, 0, between=unpin)
    assert findings.lost_pins > 0 and not findings.lost_blocks and findings.broken


async def test_blocks_that_come_back_are_found_out() -> None:
    """The disk tier as it was a life before takes the place of the last one's."""

    def put_back(disk: Path) -> None:
        earlier, now = disk.with_name("earlier"), disk.with_name("now")
        shutil.copytree(disk, now)
        if earlier.exists():
            shutil.rmtree(disk)
            earlier.rename(disk)
        now.rename(earlier)

    findings = await restarts.run(240, 8, 1, between=put_back)
    assert findings.resurrected > 0 and findings.broken
