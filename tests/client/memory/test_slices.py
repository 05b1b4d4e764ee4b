"""Loads in slices against a daemon of a few lines: whatever others hold, evict or store meanwhile, the blocks come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client import MatchResult
from prefixd.client.errors import ExhaustedError
from prefixd.client.memory.slices import Slices
from prefixd.client.memory.streaming import Slice, Wanted


class Time:
    """Passes with every call only."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


@dataclass
class Daemon:
    """Caches the first `cached` blocks of one prompt, and has room for `room` of them at a time.

    With rules, a block read for a prefix of one length has no bytes for another, but for slices of that length.
    """

    cached: int
    room: Callable[[], int]
    says: bool = True
    """How much is cached."""
    calls: list[Wanted] = field(default_factory=list)
    read: dict[int, int] = field(default_factory=dict)
    """By block, the length of the prefix for which it was read last."""

    def acquire(self, wanted: Wanted, *, has_rules: bool) -> Slice:
        self.calls.append(wanted)
        end = min(wanted.first_block + wanted.max_blocks, self.cached)
        known = min(self.cached, wanted.prefix_blocks or end) if self.says else 0
        if has_rules and self.says and wanted.prefix_blocks > self.cached:
            return Slice(0, known)
        blocks = max(0, min(end - wanted.first_block, self.room()))
        for block in range(wanted.first_block, wanted.first_block + blocks):
            of_length = wanted.prefix_blocks if self.says and wanted.prefix_blocks else wanted.first_block + blocks
            self.read[block] = of_length
        return Slice(blocks, known)


class Load(Slices):
    def __init__(self, daemon: Daemon, slice_blocks: int, *, has_rules: bool = False) -> None:
        super().__init__(slice_blocks, has_rules, Time())
        self.daemon = daemon
        self.has_rules = has_rules
        self.asked: list[int] = []

    async def match(self, end: int) -> MatchResult:
        self.asked.append(end)
        return MatchResult(min(end, self.daemon.cached), ())

    async def read(self, wanted: Wanted) -> Slice:
        return self.daemon.acquire(wanted, has_rules=self.has_rules)

    def is_good(self, first_block: int, blocks: int) -> bool:
        """Whether the bytes of all blocks are those of one prefix that can be gone on from."""
        lengths = [self.daemon.read.get(block) for block in range(first_block, first_block + blocks)]
        return None not in lengths and (not self.has_rules or set(lengths) <= {first_block + blocks})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's room changes with every call, not with time."""

    async def none(seconds: float) -> None:
        pass

    monkeypatch.setattr("prefixd.client.memory.slices.asyncio.sleep", none)


@given(
    cached=st.integers(0, 60),
    asked=st.integers(0, 60),
    first=st.integers(0, 10),
    slice_blocks=st.integers(1, 20),
    rooms=st.lists(st.integers(0, 30), min_size=1).filter(any),
    has_rules=st.booleans(),
)
def test_whatever_the_room_all_that_is_cached_comes(
    cached: int, asked: int, first: int, slice_blocks: int, rooms: list[int], has_rules: bool
) -> None:
    turns = iter(rooms * 1000)
    load = Load(Daemon(cached, lambda: next(turns)), slice_blocks, has_rules=has_rules)
    load._clock = lambda: 0.0  # room comes before anybody loses patience
    expected = max(0, min(first + asked, cached) - first)
    assert asyncio.run(load.load(first, asked)) == expected
    assert load.is_good(first, expected)
    counted = [wanted for wanted in load.daemon.calls if wanted.found is None]
    assert len(counted) + len(load.asked) == 1, "a prompt is counted as asked for once"
    assert all(wanted.max_blocks <= slice_blocks for wanted in load.daemon.calls)


@pytest.mark.parametrize("has_rules", [False, True])
async def test_what_is_evicted_meanwhile_is_not_said_to_have_come(has_rules: bool) -> None:
    daemon = Daemon(40, lambda: 30)
    load = Load(daemon, 8, has_rules=has_rules)
    reads = 0

    async def read(wanted: Wanted) -> Slice:
        nonlocal reads
        reads += 1
        daemon.cached = 40 if reads < 3 else 21
        return daemon.acquire(wanted, has_rules=has_rules)

    load.read = read  # type: ignore[method-assign]
    assert await load.load(0, 40) == 21
    assert load.is_good(0, 21)


@pytest.mark.parametrize(("has_rules", "expected"), [(False, 16), (True, 0)])
async def test_a_load_waits_some_seconds_for_room_and_then_ends(has_rules: bool, expected: int) -> None:
    rooms = iter([8, 8])
    load = Load(Daemon(40, lambda: next(rooms, 0)), 8, has_rules=has_rules)
    assert await load.load(0, 40) == expected
    assert len(load.daemon.calls) < 30


async def test_who_may_hold_nothing_hears_why() -> None:
    load = Load(Daemon(40, lambda: 8), 8)

    async def read(wanted: Wanted) -> Slice:
        raise ExhaustedError("it holds all that it may")

    load.read = read  # type: ignore[method-assign]
    with pytest.raises(ExhaustedError, match="all that it may"):
        await load.load(0, 40)


@pytest.mark.parametrize("has_rules", [False, True])
@pytest.mark.parametrize("asked", [4, 40])
async def test_a_daemon_that_does_not_know_slices_is_asked_for_all_at_once(has_rules: bool, asked: int) -> None:
    daemon = Daemon(40, lambda: 24, says=False)
    load = Load(daemon, 8, has_rules=has_rules)
    assert await load.load(0, asked) == min(asked, 24)
    assert load.is_good(0, min(asked, 24))
    assert daemon.calls[-1].max_blocks == asked
