"""The benchmark of KV groups in its short form, and that it sees a wrong byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.block_bytes import BlockBytes
from benchmarks.workloads.chat_engine import ChatEngine
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import AsyncClient, NamespaceSpec, PartSpec, SlidingWindow

ROOT = Path(__file__).resolve().parents[2]
SHORT = {"chats": 6, "turns": 4, "system-tokens": 128, "user-tokens": 512, "output-tokens": 64, "window-tokens": 256}
SPEC = NamespaceSpec("wrong", 4, (PartSpec("full", 0, 4096), PartSpec("window", 0, 4096, SlidingWindow(9))))


@pytest.mark.slow
def test_a_cache_that_knows_the_rules_serves_more(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    sizes = [word for name, value in SHORT.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.groups", *sizes, f"--json={file}"],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    result = json.loads(file.read_text())
    assert result["wrong_bytes"] == 0 and result["ratio"] >= 1.3
    assert result["possible_hit_tokens"] >= result["hit_tokens"] > result["hit_tokens_full_attention"] > 0
    assert result["cpu_bytes"] <= result["bytes_of_chats"] / 3
    rules, full = result["runs"]
    assert rules["prompts"] == full["prompts"] == 24 and rules["possible_tokens"] == full["possible_tokens"]
    assert sum(rules["hit_tokens_by_turn"]) == rules["hit_tokens"]


@pytest.mark.slow
async def test_a_wrong_byte_is_counted() -> None:
    with DaemonProcess({"cpu.bytes": "8MiB", "disk.bytes": 0}) as daemon:
        async with AsyncClient(daemon.address, memory="shared") as client:
            cache = await client.register(SPEC)
            engine = ChatEngine(cache)
            await engine.answer(range(30), range(4))
            async with await cache.acquire(range(28)) as lease:
                assert client.arena is not None and lease.blocks == 7 and not lease.has(0, 1)
                client.arena.bytes_at(lease.offset(6, 1), 4096)[:5] ^= 1
                client.arena.bytes_at(lease.offset(0, 0), 4096)[7] ^= 1
            await engine.answer(range(30), range(4))
    assert (engine.counts.hit_tokens, engine.counts.possible_tokens, engine.counts.wrong_bytes) == (28, 28, 6)
    assert engine.counts.loaded_bytes == (7 + 2) * 4096 and engine.counts.stored_blocks == 8


def test_bytes_follow_from_all_tokens_before_and_from_the_part() -> None:
    content = BlockBytes(SPEC, range(12))
    assert len(content.names) == 3
    same = BlockBytes(SPEC, [*range(8), 99, 99, 99, 99])
    other = BlockBytes(SPEC, [1, *range(1, 12)])
    assert np.array_equal(content.part(1, 0), same.part(1, 0))
    assert not np.array_equal(content.part(2, 0), same.part(2, 0))
    for block in range(3):
        assert not (content.part(block, 0) == other.part(block, 0)).all()
        assert not (content.part(block, 0) == content.part(block, 1)).all()
