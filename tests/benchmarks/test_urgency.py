"""The urgency benchmark in short, and that it sees what it looks for. What demand waits is not for a test to judge."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from benchmarks import urgency
from benchmarks.load.disk_traffic import Prompts, TrafficPlan
from benchmarks.stand_ins.steered_daemon import Orders
from benchmarks.stand_ins.throttled import DiskRate, ThrottledOps
from prefixd.client import AsyncLease

SHORT = (
    *("--loads", "3", "--load-blocks", "24", "--block-bytes", "16KiB"),
    *("--prefetch-blocks", "48", "--prefetches", "2", "--bandwidth", "20MiB", "--latency-ms", "0.5"),
)


def short_plan() -> urgency.Plan:
    return urgency.make_plan(urgency.main.parser().parse_args(SHORT))


@pytest.mark.slow
def test_all_phases_are_measured_while_others_read_and_write(tmp_path: Path) -> None:
    steps: list[None] = []
    phases = urgency.measure(short_plan(), tmp_path, lambda: steps.append(None))
    idle, ordered, unordered = phases
    assert [phase.name for phase in phases] == ["idle", "urgency", "no urgency"] and len(steps) == 9
    for phase in phases:
        assert len(phase.samples_ms) == 3 and min(phase.samples_ms) > 0 and phase.demand_blocks == 3 * 24
        assert min(phase.samples_ms) <= phase.demand_p50_ms <= phase.demand_p95_ms <= max(phase.samples_ms)
        assert phase.wrong_bytes == 0
    # 24 blocks of 16 KiB at 20 MiB/s.
    assert min(idle.samples_ms) >= 18 and idle.prefetched_blocks == 0 and idle.written_blocks == 0
    for phase in (ordered, unordered):
        assert phase.prefetched_blocks > 0
    result = urgency.summary(phases)
    assert result["demand_p50_ratio"] == pytest.approx(ordered.demand_p50_ms / idle.demand_p50_ms, abs=0.001)
    without = unordered.demand_p50_ms / idle.demand_p50_ms
    assert result["demand_p50_ratio_without_urgency"] == pytest.approx(without, abs=0.001)
    assert result["wrong_bytes"] == 0 and [phase["name"] for phase in result["phases"]] == [
        each.name for each in phases
    ]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"wrong_bytes": 3}, "wrong_bytes is 3"),
        ({"demand_p50_ratio": 2.01}, "demand_p50_ratio is 2.01, more than 2"),
        ({"demand_p50_ratio_without_urgency": 4.9}, "demand_p50_ratio_without_urgency is 4.9, less than 5"),
        ({"phases": [{}, {"name": "urgency", "of_bandwidth": 0.4}]}, "urgency: of_bandwidth is 0.4, less than 0.5"),
        ({}, ""),
    ],
)
def test_each_figure_has_a_limit(broken: dict[str, Any], words: str) -> None:
    good = {"wrong_bytes": 0, "demand_p50_ratio": 2.0, "demand_p50_ratio_without_urgency": 5.0}
    busy = [{"name": "urgency", "of_bandwidth": 0.5}, {"name": "no urgency", "of_bandwidth": 0.5}]
    found = urgency.violations({**good, "phases": [{"name": "idle", "of_bandwidth": 0.1}, *busy], **broken})
    assert len(found) == len(broken) and all(words in each for each in found)


class HeldBlocks:
    """A lease as far as `Prompts.wrong_bytes` looks at it."""

    def __init__(self, blocks: list[bytes]) -> None:
        self.blocks = len(blocks)
        self.view = lambda block, part: blocks[block]


def test_a_wrong_byte_is_seen_and_so_is_another_block() -> None:
    prompts = Prompts("some", 4, 4096)
    blocks = [prompts.content(1).part(block, 0).tobytes() for block in range(4)]
    assert prompts.wrong_bytes(cast(AsyncLease, HeldBlocks(blocks)), 1) == 0
    spoilt = [*blocks[:2], blocks[2][:17] + bytes([blocks[2][17] ^ 1]) + blocks[2][18:]]
    assert prompts.wrong_bytes(cast(AsyncLease, HeldBlocks(spoilt)), 1) == 1
    elsewhere, later = replace(prompts, name="other").content(1), prompts.content(2)
    others = [blocks[0], elsewhere.part(1, 0).tobytes(), later.part(2, 0).tobytes()]
    assert prompts.wrong_bytes(cast(AsyncLease, HeldBlocks(others)), 1) >= 2 * 512
    assert not np.intersect1d(prompts.tokens(1), prompts.tokens(2)).size


def test_a_plan_reaches_the_process_as_it_is() -> None:
    plan = short_plan().traffic
    assert TrafficPlan.from_json(plan.to_json()) == plan


def throttled(tmp_path: Path, latency_s: float, clock: Clock) -> ThrottledOps:
    """The files on a disk of 1,000 bytes a second."""
    path = tmp_path / "rate.json"
    Orders(path).write(asdict(DiskRate(1000.0, latency_s, alone=True)))
    return ThrottledOps(path, clock, clock.sleep)


class Clock:
    """Time of one disk and its callers, each of which has its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))


def test_calls_wait_for_the_bytes_asked_for_before_them(tmp_path: Path) -> None:
    clock = Clock()
    ops = throttled(tmp_path, 0.25, clock)
    fd = ops.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    data, into = memoryview(bytes(range(100))), memoryview(bytearray(100))
    assert ops.pwrite(fd, data, 0) == 100
    assert ops.pread(fd, into, 0) == 100 and into == data  # no time passes: it is asked for at the same moment
    ops.fdatasync(fd)
    clock.now_s += 1.0  # the disk has nothing left to do
    assert ops.pread(fd, into[:10], 50) == 10 and into[0] == 50
    assert clock.slept == [0.35, 0.45, 0.45, 0.26]
    os.close(fd)


def test_callers_at_the_same_time_share_the_disk(tmp_path: Path) -> None:
    clock = Clock()
    ops = throttled(tmp_path, 0.0, clock)
    fd = ops.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    callers = [threading.Thread(target=ops.pwrite, args=(fd, memoryview(bytes(100)), 0)) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(clock.slept) == [round(0.1 * number, 6) for number in range(1, 9)]
    os.close(fd)


def test_mapped_reads_are_throttled_too(tmp_path: Path) -> None:
    clock = Clock()
    ops = throttled(tmp_path, 0.0, clock)
    fd = ops.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"x" * 4096, 0)
    address = ops.map(fd, 4096)
    into = memoryview(bytearray(500))
    assert ops.copy_mapped(address, into) == 500 and bytes(into) == b"x" * 500
    assert clock.slept == [0.5]
    ops.unmap(address, 4096)
    os.close(fd)


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["urgency", "--help"])
    with pytest.raises(SystemExit, match="0"):
        urgency.main()
    said = capsys.readouterr().out
    assert "--bandwidth" in said and "Example: python -m benchmarks.urgency" in said
