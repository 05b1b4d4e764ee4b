"""Blocks that the worker has filled are entered many at a time, and held by whoever asked."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from prefixd.cache.index.trie import CPU, GPU
from tests.rig import MakeRig, Rig


def last_token_digest(data: bytes, seed: int) -> bytes:
    """Equal for blocks that end with the same token and have no parent, or any parent."""
    return xxhash.xxh3_128_digest(data[-4:], seed)


async def frames_of(rig: Rig, count: int) -> list[int]:
    frames = await rig.cache.mover.slots.take_frames(count)
    assert frames is not None
    rig.own += frames
    return frames


async def test_some_blocks_are_new_and_some_are_there(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=8, cpu=2)
    cache, chain = rig.cache, rig.chain([1, 2, 3, 4])
    holds = cache.holds
    frames = await frames_of(rig, 6)
    rows, taken = cache.record(rig.namespace, rig.namespace.root, chain, 0, frames[:3])
    assert taken.tolist() == [True] * 3
    hold = holds.hold("first", rig.trie, rows, rig.cache.tiers.compute)
    rig.own = frames[3:]
    rig.check()
    assert rig.trie.slots[rows, GPU, 0].tolist() == frames[:3]
    again, taken = cache.record(rig.namespace, int(rows[0]), chain, 1, frames[3:])
    assert again[:2].tolist() == rows[1:].tolist()
    assert taken.tolist() == [False, False, True]
    hold.extend(again[2:])
    rig.own = frames[3:5]
    rig.check()
    assert hold.rows.tolist() == [*rows.tolist(), int(again[2])]
    assert len(await cache.match(rig.namespace, chain)) == 4
    hold.shrink(1)
    assert rig.trie.held(again, GPU).tolist() == [False] * 3
    hold.end()
    cache.tiers.compute.free(rig.own)
    rig.own = []


async def test_a_block_whose_key_is_anothers_ends_the_recording(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=8, cpu=2, digest=last_token_digest)
    frames = await frames_of(rig, 5)
    first, _ = rig.cache.record(rig.namespace, rig.namespace.root, rig.chain([1, 2]), 0, frames[:2])
    rig.own = frames[2:]
    rows, taken = rig.cache.record(rig.namespace, rig.namespace.root, rig.chain([5, 2, 6]), 0, frames[2:])
    assert (len(rows), taken.tolist()) == (1, [True])
    assert rig.cache.mover.lost["key collision"] == 1
    rig.own = frames[3:]
    rig.check()
    assert not np.isin(rows, first).any()
    rig.cache.tiers.compute.free(rig.own)
    rig.own = []


async def test_a_hold_of_some_groups_is_extended_and_released_by_group(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=2, cpu=2)
    await rig.put([1, 2])
    rows = np.array(rig.rows([1, 2]), np.int64)
    holds = rig.cache.holds
    some = holds.hold("some groups", rig.trie, rows[:1], rig.cache.tiers.shared, np.ones(1, np.uint8))
    some.extend(rows[1:])
    assert some.wanted is not None and some.wanted.tolist() == [1, 1]
    assert some.release(slice(0, 1), 1).tolist() == [1] and some.release(slice(0, 2), 1).tolist() == [0, 1]
    assert not rig.trie.held(rows, CPU).any() and rig.trie.keep[rows].tolist() == [1, 1], "the blocks stay"
    some.end()
    ended = holds.hold("ended", rig.trie, rows[:1], rig.cache.tiers.shared)
    ended.end()
    with pytest.raises(RuntimeError, match="the hold of ended cannot be extended"):
        ended.extend(rows[1:])
    assert not rig.trie.held(rows, CPU).any()
