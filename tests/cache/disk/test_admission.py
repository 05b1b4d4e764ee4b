"""Blocks go to disk when they were asked for often enough (`disk.admit_uses`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixd.cache.index.trie import CPU, DISK
from tests.rig import Rig
from tests.waiting import until

ONCE, TWICE = [1, 2, 3], [1, 2, 7]


async def settled(rig: Rig) -> None:
    """Write-back has nothing more to do."""
    await until(lambda: not rig.cache.mover.queued[0])


def written_blocks(rig: Rig) -> int:
    blocks, rest = divmod(rig.cache.mover.disk.writes.written_bytes, rig.part_bytes)
    assert not rest
    return blocks


async def test_what_is_asked_for_again_is_written_ahead_of_need_and_nothing_else(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=8, disk=16, admit_uses=1, write_back=True)
    rig.start_write_back()
    await rig.put(ONCE)
    await settled(rig)
    assert (rig.cache.mover.queued, written_blocks(rig)) == ((0, 0), 0)
    rig.clock.now += 10
    await rig.put(TWICE)  # its first two blocks are asked for again
    assert await rig.get([1, 2]) == 2
    await settled(rig)
    assert rig.tiers(ONCE, DISK) == [True, True, False]
    assert rig.tiers(TWICE, DISK) == [True, True, False]
    assert written_blocks(rig) == 2
    rig.check()


async def test_more_uses_than_one_can_be_asked_of_a_block(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=8, disk=16, admit_uses=3, write_back=True)
    rig.start_write_back()
    await rig.put(ONCE)
    for wanted in (0, 0, 3):
        rig.clock.now += 10
        assert await rig.get(ONCE) == 3
        await settled(rig)
        assert written_blocks(rig) == wanted


async def test_eviction_writes_what_was_asked_for_again_and_forgets_the_rest(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=3, disk=16, admit_uses=1)
    await rig.put(ONCE)
    rig.clock.now += 10
    assert await rig.get([1]) == 1
    rig.clock.now += 10
    await rig.put([4, 5, 6])
    assert rig.tiers(ONCE, DISK) == [True]
    assert not any(rig.tiers(ONCE, CPU))
    assert written_blocks(rig) == 1
    assert not rig.cache.mover.lost, "what was asked for once is not counted as lost"


async def test_a_block_that_was_forgotten_is_known_when_it_comes_back(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=3, disk=16, admit_uses=1)
    await rig.put(ONCE)
    rig.clock.now += 10
    await rig.put([4, 5, 6])
    assert not rig.rows(ONCE)
    rig.clock.now += 10
    await rig.put(ONCE)
    rig.clock.now += 10
    await rig.put([7, 8, 9])
    assert rig.tiers(ONCE, DISK) == [True, True, True]


@pytest.mark.parametrize("how", ["durable", "persist"])
async def test_who_asks_for_durability_gets_it(make_rig: Callable[..., Rig], how: str) -> None:
    rig = make_rig(cpu=8, disk=16, admit_uses=1)
    await rig.put(ONCE, durable=how == "durable")
    if how == "persist":
        assert await rig.cache.persist(rig.namespace, rig.chain(ONCE)) == 3
    await rig.put([4, 5])
    await rig.cache.write_back.flush()
    await rig.restart()
    assert len(rig.rows(ONCE)) == 3
    assert not rig.rows([4, 5])
