"""Two dispatchers in one tier: neither waits for the other without end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import pytest

from prefixd.cache import NamespaceSpec
from prefixd.serving.dispatch.capacity.tier_share import TierShare
from prefixd.serving.request.request import Request
from tests.serving.bench import Bench
from tests.serving.fake_worker import BLOCK, GEOMETRY
from tests.waiting import WAIT_S

Make = Callable[..., Awaitable[Bench]]
Pair = tuple[Bench, Bench]


@pytest.fixture
async def pair(make_bench: Make) -> AsyncIterator[Pair]:
    """Twelve frames for two models of one shape."""
    share = TierShare()
    first = await make_bench(12, share=share)
    spec = NamespaceSpec("other", BLOCK, first.kv.parts(GEOMETRY.block_bytes))
    other = Bench(first.cache, first.cache.register(spec), first.kv, first.engine)
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
    async with asyncio.timeout(WAIT_S):
        while any(bench.dispatcher.waiting or bench.dispatcher.running for bench in pair):
            for bench in pair:
                bench.answer_cancels()
                bench.step()
            await asyncio.sleep(0.001)


async def test_a_prompt_of_one_is_unknown_to_the_other(pair: Pair) -> None:
    a, b = pair
    for bench, found in ((a, 0), (b, 0), (a, 2 * BLOCK), (b, 2 * BLOCK)):
        request = bench.submit(prompt(1, 3))
        await bench.running(request)
        await finish(pair)
        assert request.hit_tokens == [found, 0, 0, 0]


async def test_two_names_of_the_same_weights_share_what_they_compute(make_bench: Make) -> None:
    """Of a copy of a model the namespace is the same: each dispatcher reads the other's blocks and holds its own."""
    share = TierShare()
    first = await make_bench(12, share=share)
    copy = Bench(first.cache, first.namespace, first.kv, first.engine)
    copy._ids = itertools.count(1000)
    copy.begin(share=share)
    try:
        one, two = first.submit(prompt(1, 3), max_tokens=2 * BLOCK), copy.submit(prompt(1, 3), max_tokens=2 * BLOCK)
        await first.running(one)
        await copy.running(two)
        await finish((first, copy))
        again = copy.submit(prompt(1, 3))
        await copy.running(again)
        await finish((first, copy))
        assert again.hit_tokens == [2 * BLOCK, 0, 0, 0]
        assert [bench.dispatcher.counters.finished for bench in (first, copy)] == [1, 2]
    finally:
        await copy.dispatcher.stop()
        copy.dispatcher.abandon()
        copy.dispatcher.queue.check_integrity()


async def test_requests_that_each_have_a_part_of_the_tier_end(pair: Pair) -> None:
    """Both fit when they begin, and come to need twelve frames between them and more: one gives way."""
    a, b = pair
    runs = [bench.submit(prompt(seed, 5), max_tokens=4 * BLOCK) for seed, bench in enumerate(pair, 1)]
    await a.running(runs[0])
    await b.running(runs[1])
    await finish(pair)
    assert [bench.dispatcher.counters.finished for bench in pair] == [1, 1]
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
    assert [bench.dispatcher.counters.finished for bench in pair] == [len(busy), 1]
