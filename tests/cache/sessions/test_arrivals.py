"""Hits count by where a prompt's blocks lay when its request came, which a hint (Prefetch) says."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.trie import CPU, DISK
from prefixd.cache.sessions.arrivals import KEPT_S, MOST, Arrivals
from tests.cache.moving.test_beginnings import store
from tests.rig import BLOCK_TOKENS, Rig

TIER = 32
PROMPT = list(range(16))
OTHERS = list(range(1000, 1000 + TIER))


@pytest.fixture
async def rig(make_rig: Callable[..., Rig]) -> Rig:
    """With a prompt that is on disk alone."""
    rig = make_rig(cpu=TIER, disk=512)
    await store(rig, PROMPT)
    await store(rig, OTHERS)
    assert not any(rig.tiers(PROMPT, CPU))
    return rig


def hits(rig: Rig) -> dict[int, int]:
    """Blocks found since the start, by tier."""
    found = rig.cache.counters.hit_tokens
    return {tier: tokens // BLOCK_TOKENS for tier, tokens in enumerate(found) if tokens}


async def hint(rig: Rig, prompt: list[int]) -> None:
    await rig.cache.prefetch(rig.session, rig.namespace, rig.chain(prompt))
    await rig.cache.mover.quiesce()


async def test_a_lease_after_a_hint_counts_where_the_blocks_lay_before_it(rig: Rig) -> None:
    await hint(rig, PROMPT)
    assert all(rig.tiers(PROMPT, CPU))
    assert await rig.get(PROMPT) == 16
    assert hits(rig) == {DISK: 16}
    assert await rig.get(PROMPT) == 16
    assert hits(rig) == {DISK: 16, CPU: 16}, "the next request comes when they are in the CPU tier"


async def test_a_second_hint_changes_nothing(rig: Rig) -> None:
    await hint(rig, PROMPT)
    await hint(rig, PROMPT)
    assert await rig.get(PROMPT) == 16
    assert hits(rig) == {DISK: 16}


async def test_a_hint_for_the_beginning_counts_for_the_beginning(rig: Rig) -> None:
    await hint(rig, PROMPT[:6])
    assert all(rig.tiers(PROMPT, CPU)[:6])
    assert await rig.get(PROMPT) == 16
    assert hits(rig) == {DISK: 16}


async def test_a_counted_match_takes_the_hint(rig: Rig) -> None:
    await hint(rig, PROMPT)
    chain = rig.chain(PROMPT)
    path = await rig.cache.match(rig.namespace, chain)
    rig.cache.count_lookup(rig.session, rig.namespace, chain, path)
    assert hits(rig) == {DISK: 16} and not len(rig.session.arrivals)


async def test_another_sessions_hint_is_nobody_elses(rig: Rig) -> None:
    await hint(rig, PROMPT)
    chain = rig.chain(PROMPT)
    assert not len(Arrivals().take(rig.namespace, chain, 0.0))
    other = rig.cache.leases.open("other", 1, rig.cache.clock(), rig.session.tenant)
    rig.cache.count_lookup(other, rig.namespace, chain, await rig.cache.match(rig.namespace, chain))
    assert hits(rig) == {CPU: 16}


# -- what is remembered, against a model ---------------------------------------------------------------------------


def hashed(rig: Rig, prompt: list[int]) -> BlockChain:
    """As a lookup leaves it."""
    chain = rig.chain(prompt)
    chain.key(len(chain) - 1)
    return chain


def test_arrivals_are_bounded_in_number_and_in_time(make_rig: Callable[..., Rig]) -> None:
    rig, arrivals = make_rig(cpu=8), Arrivals()
    for number in range(MOST + 10):
        arrivals.note(rig.namespace, hashed(rig, [number, 0]), np.array([DISK, CPU], np.int8), float(number))
    assert len(arrivals) == MOST
    assert not len(arrivals.take(rig.namespace, hashed(rig, [9, 0]), MOST + 10.0)), "the oldest ones went"
    assert arrivals.take(rig.namespace, hashed(rig, [10, 0]), MOST + 10.0).tolist() == [DISK, CPU]
    assert not len(arrivals.take(rig.namespace, hashed(rig, [11, 0]), 11 + KEPT_S + 1e-6)), "too long ago"
    assert arrivals.take(rig.namespace, hashed(rig, [12, 0]), 12 + KEPT_S).tolist() == [DISK, CPU]


def test_the_longest_beginning_counts_for_random_hints(make_rig: Callable[..., Rig]) -> None:
    rig, arrivals, draw = make_rig(cpu=8), Arrivals(), np.random.default_rng(3)
    noted: dict[tuple[int, ...], list[int]] = {}
    for _ in range(400):
        prompt = tuple(draw.integers(0, 2, draw.integers(1, 7)).tolist())
        chain = hashed(rig, list(prompt))
        if draw.random() < 0.5:
            tiers = draw.integers(0, 4, len(prompt)).astype(np.int8)
            arrivals.note(rig.namespace, chain, tiers, 0.0)
            noted.setdefault(prompt, tiers.tolist())
        else:
            beginnings = [prompt[:end] for end in range(len(prompt), 0, -1) if prompt[:end] in noted]
            expected = noted.pop(beginnings[0]) if beginnings else []
            assert arrivals.take(rig.namespace, chain, 0.0).tolist() == expected


def test_many_runs_are_cut(make_rig: Callable[..., Rig]) -> None:
    """Blocks behind the first 64 runs count where they are."""
    rig, arrivals = make_rig(cpu=8), Arrivals()
    chain = hashed(rig, list(range(200)))
    arrivals.note(rig.namespace, chain, np.array([CPU, DISK] * 100, np.int8), 0.0)
    assert arrivals.take(rig.namespace, chain, 0.0).tolist() == [CPU, DISK] * 32


def test_a_prompt_of_many_runs_takes_no_more_memory(make_rig: Callable[..., Rig]) -> None:
    rig, arrivals = make_rig(cpu=8), Arrivals()
    chain, tiers = hashed(rig, list(range(50_000))), np.array([CPU, DISK] * 25_000, np.int8)
    chain.key(len(chain) - 1)  # hashes them all
    tracemalloc.start()
    try:
        arrivals.note(rig.namespace, chain, tiers, 0.0)
        assert tracemalloc.get_traced_memory()[0] < 16_384, "64 runs, and not the lengths of all 50,000"
    finally:
        tracemalloc.stop()
