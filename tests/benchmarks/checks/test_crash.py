"""The crash harness in short, and proof that it sees: data that is gone and bytes that are wrong are found out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.checks import crash
from benchmarks.common.block_bytes import wrong_bytes
from benchmarks.load.mixed_load import LoadPlan, MixedLoad
from benchmarks.load.world import NAMESPACES, Prompt, block_key, content, prompts
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client


def test_content_follows_from_namespace_prefix_and_part() -> None:
    prompt = Prompt(2, 0, 7)
    size = prompt.spec.block_bytes
    whole = content(prompt)
    assert len(whole) == prompt.blocks * size
    assert np.array_equal(content(prompt, 1), whole[size:])
    first, second = (spec.nbytes for spec in prompt.spec.parts)
    assert np.array_equal(content(prompt, 0, (1,))[:second], whole[first:size])
    same_family = Prompt(2, 3, 7 + 6)
    shared = prompt.shared_blocks * size
    assert np.array_equal(content(same_family)[:shared], whole[:shared])
    blocks = [content(each)[-each.spec.block_bytes :].tobytes() for each in prompts(8)]
    assert len(set(blocks)) == 8 * len(NAMESPACES)  # other salts have other bytes, too
    torn = np.concatenate([whole[: size // 2], content(same_family)[size // 2 : size]])
    assert wrong_bytes(whole[size : 2 * size], torn) > size // 2


@pytest.mark.slow
def test_the_key_is_the_daemons(tmp_path: Path) -> None:
    with DaemonProcess({"cpu.bytes": "4MiB", "disk.bytes": 0}) as daemon, Client(daemon.address) as client:
        prompt = Prompt(1, 0, 3)
        client.register(prompt.spec).store(prompt.tokens, content(prompt))
        assert client.inspect(block_key(prompt, prompt.blocks - 1)).prefix.blocks == prompt.blocks


@pytest.mark.slow
async def test_an_audit_sees_wrong_bytes_and_missing_blocks() -> None:
    there, wrong, missing = (Prompt(0, 1, number) for number in (1, 2, 3))
    with DaemonProcess({"cpu.bytes": "4MiB", "disk.bytes": 0}) as daemon:
        with Client(daemon.address) as client:
            cache = client.register(NAMESPACES[0])
            cache.store(there.tokens, content(there))
            bytes_of_wrong = content(wrong)
            bytes_of_wrong[-1] ^= 1
            cache.store(wrong.tokens, bytes_of_wrong)
        async with MixedLoad(daemon.address, LoadPlan(1, 0)) as load:
            load.durable = dict.fromkeys((there, wrong, missing))
            load.forgotten = {there: None}
            load.pinned = dict.fromkeys((there, missing))
            audit = await load.audit([])
    assert load.tally.wrong_bytes == 1 and len(load.tally.wrong) == 1
    assert audit.lost_blocks == missing.blocks and len(audit.lost) == 1 and str(missing) in audit.lost[0]
    assert list(load.durable) == [there, wrong]
    assert audit.back == [str(there)]
    assert audit.pinned == 2 and audit.unpinned == [str(there), str(missing)] and not load.pinned


@pytest.mark.slow
def test_kills_break_no_promise(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    crash.main(["--kills", "3", "--json", str(file)])
    result = json.loads(file.read_text())
    broken = ("wrong_bytes", "lost_durable", "reopen_failures", "resurrected", "lost_pins")
    broken += ("integrity_violations", "failed_calls")
    assert (result["kills"], [result[name] for name in broken]) == (3, [0] * 7), result["found"]
    assert result["verified_bytes"] > 1e6 and result["durable_prompts_checked"] > 10


@pytest.mark.slow
def test_blocks_that_are_gone_after_a_kill_are_found_out() -> None:
    findings = crash.run(1, 0, between=lambda data: shutil.rmtree(data / "blocks"))
    assert findings.lost_durable > 0 and findings.broken
    assert any("lost: Prompt" in note for note in findings.notes)
