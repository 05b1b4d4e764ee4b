"""A prefix longer than the room: the longest beginning that fits is leased, and only that counts as found.

The model knows prompts, lengths and slots alone: of a tier with `free` slots that nobody's lease has, a prompt gets the
longest prefix whose parts that no lease has are at most `free`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixd.base.rules.rules import ChunkedWindow, RecurrentState, SlidingWindow
from prefixd.cache import (
    Lease,
    Namespace,
    NamespaceSpec,
    PartSpec,
)
from prefixd.cache.index.trie import CPU, DISK
from tests.rig import BLOCK_TOKENS, PART_BYTES, Rig

TIER = 64  # blocks


async def store(rig: Rig, prompt: Sequence[int], namespace: Namespace | None = None) -> None:
    """Stores all of a prompt on disk, however little of it the CPU tier takes at a time."""
    there = -1
    while len(rig.rows(prompt, namespace)) < len(prompt):
        assert len(rig.rows(prompt, namespace)) > there, "nothing more could be stored"
        there = len(rig.rows(prompt, namespace))
        await rig.put(prompt, namespace=namespace, durable=True)


@pytest.mark.parametrize("blocks", [32, 64, 65, 70, 100, 150, 256])
async def test_of_a_prompt_longer_than_the_tier_as_much_is_leased_as_fits(
    make_rig: Callable[..., Rig], blocks: int
) -> None:
    rig = make_rig(cpu=TIER, disk=2 * blocks)
    prompt = list(range(blocks))
    await store(rig, prompt)
    for _ in range(3):
        assert await rig.get(prompt) == min(blocks, TIER)


@pytest.mark.parametrize("blocks", [20, 60, 100])
async def test_beside_a_lease_as_much_is_leased_as_it_leaves(make_rig: Callable[..., Rig], blocks: int) -> None:
    rig = make_rig(cpu=TIER, disk=512)
    others, prompt = list(range(40)), list(range(100, 100 + blocks))
    await store(rig, others)
    assert await rig.lease(others) is not None
    await store(rig, prompt)  # so the tier has its end, and of more than 24 blocks not its beginning
    for _ in range(3):
        assert await rig.get(prompt) == min(blocks, TIER - 40)


async def test_slice_after_slice_all_of_a_long_prompt_can_be_read(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=TIER, disk=512)
    prompt = list(range(4 * TIER))
    await store(rig, prompt)
    lease = await rig.lease(prompt[:40])
    assert lease is not None
    done = 0
    while done < len(prompt):
        some = await rig.lease(prompt, first_block=done, prefix_blocks=len(prompt))
        assert some is not None
        # The first 40 are those that the lease has.
        assert len(some.rows) == (TIER if not done else min(TIER - 40, len(prompt) - done))
        done += len(some.rows)
        rig.cache.release(rig.session, some.id)


async def test_two_who_want_the_same_long_prompt_share_its_beginning(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=TIER, disk=512)
    prompt = list(range(150))
    await store(rig, prompt)
    first, second = await asyncio.gather(rig.lease(prompt), rig.lease(prompt))
    assert first is not None and second is not None
    assert first.rows.tolist() == second.rows.tolist() == rig.rows(prompt)[:TIER]


async def test_two_long_prompts_share_the_tier_and_neither_waits(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=TIER, disk=1024)
    prompts = [list(range(start, start + 150)) for start in (0, 1000)]
    for prompt in prompts:
        await store(rig, prompt)
    leases = await asyncio.wait_for(asyncio.gather(*map(rig.lease, prompts)), 30)
    assert sum(len(lease.rows) for lease in leases if lease is not None) == TIER


async def test_a_prefetch_gives_way_to_whoever_wants_the_prompt_now(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=TIER, disk=512)
    prompt = list(range(96))
    await store(rig, prompt)
    await rig.cache.prefetch(rig.session, rig.namespace, rig.chain(prompt))
    assert await rig.get(prompt) == TIER


async def test_a_prefetch_brings_the_beginning_of_a_prompt_longer_than_the_tier(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=TIER, disk=512)
    prompt = list(range(96))
    await store(rig, prompt)
    await rig.cache.prefetch(rig.session, rig.namespace, rig.chain(prompt))
    await rig.cache.mover.quiesce()
    assert all(rig.tiers(prompt, CPU)[:TIER])


@pytest.mark.parametrize("prefix_blocks", [0, 40])
async def test_a_damaged_block_ends_the_lease_and_is_not_looked_for_again_and_again(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, prefix_blocks: int
) -> None:
    rig = make_rig(cpu=TIER, disk=512)
    prompt, others = list(range(40)), list(range(100, 100 + TIER))
    await store(rig, prompt)
    await store(rig, others)
    assert not any(rig.tiers(prompt, CPU))
    rig.damage(rig.rows(prompt)[10])
    brought = 0
    bring = rig.cache.mover.bring

    async def count(*args: Any, **how: Any) -> int:
        nonlocal brought
        brought += 1
        return await bring(*args, **how)

    monkeypatch.setattr(rig.cache.mover, "bring", count)
    lease = await rig.lease(prompt, prefix_blocks=prefix_blocks)
    assert lease is not None and len(lease.rows) == 10
    assert brought < 8


async def test_found_is_what_was_leased(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=TIER, disk=512)
    prompt = list(range(150))
    await store(rig, prompt)
    await rig.get(prompt)
    counters = rig.cache.counters
    assert (counters.asked_tokens, sum(counters.hit_tokens)) == (150 * BLOCK_TOKENS, TIER * BLOCK_TOKENS)
    assert counters.hit_tokens[DISK] == TIER * BLOCK_TOKENS, "they lay on disk when they were asked for"


# -- any lengths, any leases ---------------------------------------------------------------------------------------

FULL, WINDOW, CHUNK, STATE = "full", "window", "chunk", "state"
KINDS = [(FULL,), (FULL, WINDOW), (FULL, CHUNK), (FULL, STATE), (FULL, WINDOW, STATE), (WINDOW,)]
WINDOW_BLOCKS, CHUNK_BLOCKS = 3, 3


def spec_of(kinds: Sequence[str]) -> NamespaceSpec:
    rules = {
        FULL: None,
        WINDOW: SlidingWindow(WINDOW_BLOCKS * BLOCK_TOKENS + 1),
        CHUNK: ChunkedWindow(CHUNK_BLOCKS * BLOCK_TOKENS),
        STATE: RecurrentState(),
    }
    parts = (PartSpec(kind, 0, PART_BYTES, rules[kind]) for kind in kinds)
    return NamespaceSpec("-".join(kinds), BLOCK_TOKENS, tuple(parts))


def needed(kinds: Sequence[str], length: int, first: int) -> set[tuple[int, int]]:
    """The (block, part) from `first` on that a reader of a prefix of `length` blocks needs."""
    begins = {
        FULL: 0,
        WINDOW: length - WINDOW_BLOCKS,
        CHUNK: length // CHUNK_BLOCKS * CHUNK_BLOCKS,
        STATE: length - 1,
    }
    return {(block, part) for part, kind in enumerate(kinds) for block in range(max(begins[kind], first, 0), length)}


@dataclass
class Model:
    """Which parts of which prefixes leases hold."""

    slots: int
    kinds: Sequence[str]
    held: list[set[tuple[tuple[int, ...], int]]] = field(default_factory=list)

    def parts(self, prompt: Sequence[int], length: int, first: int) -> set[tuple[tuple[int, ...], int]]:
        return {(tuple(prompt[: block + 1]), part) for block, part in needed(self.kinds, length, first)}

    def fitting(self, prompt: Sequence[int], first: int, end: int) -> int:
        """The most blocks that can be leased of the prompt from `first` to before `end`."""
        there = set().union(*self.held)
        free = self.slots - len(there)
        fits = [n for n in range(first + 1, end + 1) if len(self.parts(prompt, n, first) - there) <= free]
        return max(fits, default=first) - first

    def surely_fitting(self, prompt: Sequence[int], first: int, end: int) -> int:
        """As `fitting`, where the tier keeps what it does not take apart: the blocks before one that it holds, and of a
        block that it holds, and of those before it, the bytes of groups that nobody has leased."""
        there = {
            (block[:end], part)
            for block, _ in set().union(*self.held)
            for end in range(1, len(block) + 1)
            for part in range(len(self.kinds))
        }
        free = self.slots - len(there)
        every = [(tuple(prompt[: block + 1]), part) for block in range(end) for part in range(len(self.kinds))]
        fits = [n for n in range(first + 1, end + 1) if len(set(every[: n * len(self.kinds)]) - there) <= free]
        return max(fits, default=first) - first


prompts = st.tuples(st.sampled_from([0, 3, 7]), st.integers(1, 16), st.sampled_from([1, 2])).map(
    lambda drawn: [0] * drawn[0] + [drawn[2]] * drawn[1]
)
steps = st.lists(
    st.tuples(prompts, st.just(0) | st.integers(0, 6), st.just(0) | st.integers(0, 12), st.booleans()),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=st.sampled_from(KINDS), slots=st.integers(3, 16), asked=steps, seed=st.integers(0, 1 << 16))
def test_the_longest_beginning_that_fits_is_leased(
    kinds: Sequence[str],
    slots: int,
    asked: list[tuple[list[int], int, int, bool]],
    seed: int,
) -> None:
    """Random room, lengths and leases: each lease has what the model says, and every byte of it is right."""

    async def run(path: Path) -> None:
        rig = Rig(path, cpu=slots, disk=2000)
        home = rig.cache.register(spec_of(kinds))
        for prompt, *_ in asked:
            for length in range(1, len(prompt) + 1):  # of every block everything: all lengths can be gone on from
                await rig.put(prompt[:length], namespace=home, durable=True)
        any_first = any(first for _, first, *_ in asked)
        model, leases, choose = Model(slots, kinds), list[Lease](), random.Random(seed)
        for prompt, first, most, release in asked:
            if release and leases:
                at = choose.randrange(len(leases))
                rig.cache.release(rig.session, leases.pop(at).id)
                model.held.pop(at)
            end = min(first + most, len(prompt)) if most else len(prompt)
            fitting, surely_fitting = model.fitting(prompt, first, end), model.surely_fitting(prompt, first, end)
            lease = await rig.lease(prompt, namespace=home, first_block=first, max_blocks=most)
            blocks = 0 if lease is None else len(lease.rows)
            assert surely_fitting <= blocks <= fitting
            if kinds == (FULL,) and not any_first:
                assert blocks == fitting
            if lease is not None:
                leases.append(lease)
                model.held.append(model.parts(prompt, first + blocks, first))
            rig.check()
        await rig.close()

    with TemporaryDirectory(prefix="prefixd-test-") as folder:
        asyncio.run(run(Path(folder)))
