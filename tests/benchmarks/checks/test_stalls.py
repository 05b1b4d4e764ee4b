"""The stalls benchmark at a small size, and that it sees a callback that holds the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checks import stalls
from benchmarks.load.loop_watch import LoopWatch, WatchedDaemon, name_of
from tests.benchmarks.test_benchmarks_run import run

BLOCKS = "4096"

PLANTED = """
import sys
import time

import benchmarks.load.loop_watch
from prefixd.server.figures.snapshot import Snapshot


def held(self, take=Snapshot.troubles):
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    return take(self)


Snapshot.troubles = held
benchmarks.load.loop_watch.main()
"""


OVERLOADED = """
import time

import benchmarks.load.loop_watch
from prefixd.server.services.cache_service import PrefixCacheService


def slow(self, session_id, namespace_id, opened=PrefixCacheService._opened):
    until = time.thread_time() + 0.006
    while time.thread_time() < until:
        pass
    return opened(self, session_id, namespace_id)


PrefixCacheService._opened = slow
benchmarks.load.loop_watch.main()
"""


class Planted(WatchedDaemon):
    """A daemon whose Stats computes for a fifth of a second on the event loop."""

    source = PLANTED

    def __init__(self, settings: Mapping[str, object] | None = None, **how: Any) -> None:
        super().__init__(settings, **how)
        program = self.directory / "planted.py"
        program.write_text(self.source)
        self._program = (str(program), "--holds", str(self.holds_file))


@pytest.mark.slow
def test_every_call_is_measured(tmp_path: Path) -> None:
    """A hold above the limit fails and is named. Work comes in slices of a millisecond, on a fast machine too."""
    file = tmp_path / "result.json"
    done = run("benchmarks.checks.stalls", "--blocks", BLOCKS, "--limit-ms", "0.001", "--json", str(file))
    assert done.returncode == 2, done.stderr
    assert "the event loop was held for more than 0.001 ms: " in done.stderr
    result = json.loads(file.read_text())
    assert f"{result['worst_call']}: {result['worst_hold_ms']:g} ms in " in done.stderr
    calls = {call["name"]: call for call in result["calls"]}
    assert list(calls) == list(stalls.CALLS)
    assert all(0 <= call["longest_hold_ms"] <= call["longest_wait_ms"] for call in calls.values())
    assert all(call["bystander_p99_ms"] > 0 and not call["bystander_failures"] for call in calls.values())
    assert result["worst_hold_ms"] == max(call["longest_hold_ms"] for call in calls.values()) > 0
    assert calls[result["worst_call"]]["longest_hold_ms"] == result["worst_hold_ms"]


@pytest.mark.slow
def test_a_planted_stall_is_seen_and_named() -> None:
    match, stats, scrape = stalls.run(1024, ("match", "stats", "scrape"), daemon_type=Planted)
    assert match.longest_hold_ms < 150
    assert stalls.broken([match], 150) == []
    assert "stats: " in stalls.broken([match, stats], 150)[0]
    for call in (stats, scrape):
        assert call.longest_hold_ms >= 200
        assert "planted.py" in call.where and "held" in call.where, call.where
    assert stats.callback.startswith("AdminService.Stats")
    assert stats.bystander_p99_ms >= 100


class Overloaded(Planted):
    """A daemon that takes 6 ms for each match; the bystander begins one every 5 ms."""

    source = OVERLOADED


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_overloaded_daemon_is_measured_too() -> None:
    """On a machine that does much else every daemon is overloaded."""
    (match,) = stalls.run(1024, ("match",), daemon_type=Overloaded)
    assert match.bystander_p99_ms > 0 and match.longest_hold_ms >= 6


async def test_what_the_watch_records(tmp_path: Path) -> None:
    file = tmp_path / "holds.jsonl"
    watch = LoopWatch(file)
    watch.install()

    async def inner() -> None:
        await asyncio.sleep(0)
        until = time.thread_time() + 0.3
        while time.thread_time() < until:
            pass
        await asyncio.sleep(0)
        time.sleep(0.04)

    async def outer() -> None:
        await inner()

    try:
        await asyncio.create_task(outer())
        ended_s, written_until_s = time.monotonic(), 0.0
        while written_until_s <= ended_s:
            assert time.monotonic() < ended_s + 30
            await asyncio.sleep(0.02)
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            written_until_s = max((line["until_s"] for line in lines if "until_s" in line), default=0.0)
        # More than two, where this machine held another step.
        records: list[dict[str, Any]] = [line for line in lines if "outer" in line.get("name", "")]
    finally:
        watch.remove()
    busy = max(records, key=lambda record: record["cpu_ms"])
    blocked = max((record for record in records if record is not busy), key=lambda record: record["wall_ms"])
    assert 300 <= busy["cpu_ms"] < 6000 and busy["wall_ms"] >= busy["cpu_ms"] - 1
    assert "test_stalls.py" in busy["where"] and "inner" in busy["where"]
    assert blocked["wall_ms"] >= 40 and blocked["cpu_ms"] < 30
    assert busy["name"].startswith("test_what_the_watch_records.<locals>.outer > ")


async def test_names_of_callbacks() -> None:
    class Call:
        def method(self) -> None:
            pass

    from functools import partial

    assert name_of(partial(partial(Call().method))).endswith("Call.method")
    assert name_of(print) == "print"
