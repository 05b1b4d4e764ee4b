"""Two dispatchers in one tier: neither waits for the other without end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, cast

import pytest

from prefixd.cache import NamespaceSpec
from prefixd.server.tier_share import TierShare
from tests.server.dispatcher.conftest import BLOCK, GEOMETRY, Bench

if TYPE_CHECKING:
    from prefixd.server.request import Request

Make = Callable[..., Awaitable[Bench]]
Pair = tuple[Bench, Bench]


@pytest.fixture
async def pair(make_bench: Make) -> AsyncIterator[Pair]:
    """Twelve frames for two models of one shape."""
    share = TierShare()
    first = await make_bench(12, share=share)
    spec = NamespaceSpec("other", BLOCK, first.kv.parts(GEOMETRY.block_bytes))
    other = Bench(first.cache, first.engine, first.cache.register(spec), first.kv)
    other._ids = itertools.count(1000)
    other.begin(share=share)
    yield first, other
    await other.dispatcher.stop()
    other.dispatcher.abandon()
    other.dispatcher.queue.check_integrity()


def prompt(seed: int, blocks: int) -> list[int]:
    return [1000 * seed + token for token in range(blocks * BLOCK - 1)]


async def finish(pair: Pair) -> None:
    """Computes until nothing waits or runs in either."""
    deadline = time.monotonic() + 60
    while any(bench.dispatcher.waiting or bench.dispatcher.running for bench in pair):
        assert time.monotonic() < deadline, "not within 60 s"
        for bench in pair:
            bench.answer_cancels()
            bench.step()
        await asyncio.sleep(0.001)


async def test_requests_that_each_have_a_part_of_the_tier_end(pair: Pair) -> None:
    """Both fit when they begin, and come to need twelve frames between them and more: one gives way."""
    a, b = pair
    runs = [bench.submit(prompt(seed, 5), max_tokens=4 * BLOCK) for seed, bench in enumerate(pair, 1)]
    await a.running(runs[0])
    await b.running(runs[1])
    await finish(pair)
    assert [bench.dispatcher.finished for bench in pair] == [1, 1]
    assert b.dispatcher.preemption.counters.preempted == 1, "who was handed over last"
    assert not a.dispatcher.preemption.counters.preempted


async def test_a_busy_model_does_not_starve_the_other(pair: Pair) -> None:
    """Of b's request, which needs most of the tier, all frames come from a's, which end one by one while more wait."""
    a, b = pair
    busy: list[Request] = [a.submit(prompt(seed, 4), max_tokens=2) for seed in range(1, 6)]
    await a.running(busy[1])
    large = b.submit(prompt(900, 10), max_tokens=2)
    await b.quiet()
    while large.id in b.dispatcher.waiting:
        assert len(busy) < 100, "it never gets its turn"
        busy.append(a.submit(prompt(1 + len(busy), 4), max_tokens=2))
        a.answer_cancels()
        if oldest := next(iter(a.runs.values()), None):
            a.step(cast("Request", oldest.start))  # the others still have their frames
        await asyncio.sleep(0.003)
    assert a.dispatcher.waiting, "there was always more to do for a"
    await finish(pair)
    assert [bench.dispatcher.finished for bench in pair] == [len(busy), 1]
