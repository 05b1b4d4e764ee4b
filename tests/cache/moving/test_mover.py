"""Where blocks go when a tier is full, how they come back, and that what is leased stays where it is."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from prefixd.base.errors import ExhaustedError
from prefixd.cache.index.trie import CPU, DISK, GPU
from tests.rig import MakeRig
from tests.tries import forget_blocks, subtree_rows


async def test_blocks_go_down_a_tier_at_a_time_and_come_up_straight(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=2, cpu=2, disk=4)
    for prompt in ([1, 2], [3, 4], [5, 6]):
        rig.unhold(await rig.put_gpu(prompt), rig.cache.tiers.compute)
    assert [rig.trie.nearest[rig.rows(p)].tolist() for p in ([5, 6], [3, 4], [1, 2])] == [
        [GPU, GPU],
        [CPU, CPU],
        [DISK, DISK],
    ]
    rows = rig.rows([1, 2])
    rig.trie.hold(np.array(rows), GPU)
    assert await rig.cache.mover.bring(rig.trie, np.array(rows), rig.cache.tiers.compute) == 2
    assert [rig.read(rig.frame(int(rig.trie.slots[row, GPU, 0]))) for row in rows] == [
        rig.content(rig.namespace, rig.chain([1, 2]), block) for block in (0, 1)
    ]
    assert not any(rig.tiers([1, 2], CPU)), "not by way of the CPU tier"
    gpu, cpu = (rig.cache.tiers.counters[tier.level] for tier in rig.cache.tiers.memories)
    assert (gpu.promoted, gpu.demoted, cpu.demoted) == (2, 6, 4)
    rig.unhold(rows, rig.cache.tiers.compute)


async def test_a_block_that_is_on_disk_still_goes_down_by_way_of_the_cpu_tier(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=2, cpu=2, disk=8)
    rig.unhold(await rig.put_gpu([1, 2]), rig.cache.tiers.compute)
    assert await rig.cache.write_back.flush() == 2
    assert (rig.tiers([1, 2], CPU), rig.tiers([1, 2], DISK)) == ([False] * 2, [True] * 2)
    rig.unhold(await rig.put_gpu([3, 4]), rig.cache.tiers.compute)
    assert (rig.tiers([1, 2], GPU), rig.tiers([1, 2], CPU)) == ([False] * 2, [True] * 2)
    assert await rig.get([1, 2]) == 2


async def test_without_a_tier_below_the_least_recent_leaf_is_forgotten(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=3)
    await rig.put([1, 2])
    await rig.put([3])
    await rig.get([1, 2])
    await rig.put([4])
    assert (len(rig.rows([1, 2])), len(rig.rows([3])), len(rig.rows([4]))) == (2, 0, 1)
    await rig.put([5])
    assert (len(rig.rows([1, 2])), len(rig.rows([4])), len(rig.rows([5]))) == (1, 1, 1), "the leaf, not its parent"


async def test_clean_blocks_are_evicted_without_a_copy(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=2, disk=8)
    await rig.put([1, 2], durable=True)
    assert rig.store is not None
    before = rig.store.commits
    await rig.put([3, 4])
    assert rig.store.commits == before
    assert rig.cache.tiers.counters[rig.cache.tiers.shared.level].demoted == 0
    assert (rig.tiers([1, 2], CPU), rig.tiers([1, 2], DISK)) == ([False] * 2, [True] * 2)
    assert await rig.get([1, 2]) == 2


async def test_what_is_leased_does_not_move(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=3, disk=8)
    await rig.put([1, 2])
    lease = await rig.lease([1, 2])
    assert lease is not None
    slots = rig.cache.offsets(lease, [0]).tolist()
    for other in range(10, 16):
        await rig.put([other])
    assert await forget_blocks(rig.cache.mover, rig.trie, rig.rows([1, 2])[::-1]) == 0
    assert rig.cache.offsets(lease, [0]).tolist() == slots
    rig.check_lease(lease, rig.namespace, rig.chain([1, 2]))


async def test_when_nothing_may_go_there_is_no_room_and_it_is_said(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=2, disk=8)
    await rig.put([1, 2])
    lease = await rig.lease([1, 2])
    with rig.nothing_lost(), pytest.raises(ExhaustedError, match=r"8192 bytes\) has no room.*4096 bytes.*cpu\.bytes"):
        await rig.put([1, 2, 3])
    assert lease is not None
    rig.cache.release(rig.session, lease.id)
    assert await rig.put([1, 2, 3]) == (1, 0)


async def test_a_reservation_is_as_long_as_there_is_room(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=3)
    assert await rig.put([1, 2, 3, 4, 5]) == (3, 0)
    assert await rig.get([1, 2, 3, 4, 5]) == 3


async def test_a_lease_is_as_long_as_the_cpu_tier_can_take(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=3, disk=8)
    await rig.put([1, 2, 3], durable=True)
    await rig.put([1, 2, 3, 4], durable=True)
    other = await rig.lease([1])
    assert other is not None
    await rig.put([9, 9])
    taken = await rig.lease([9, 9])
    assert taken is not None
    with rig.nothing_lost():
        assert await rig.get([1, 2, 3, 4]) == 1, "one slot, and that has the first block"
    rig.cache.release(rig.session, taken.id)
    assert await rig.get([1, 2, 3, 4]) == 3


async def test_pinned_blocks_leave_a_tier_but_not_the_cache(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=2, disk=2)
    await rig.put([1, 2])
    rig.trie.pinned[rig.rows([1, 2])] = True
    for other in range(10, 15):
        await rig.put([other])
    assert await forget_blocks(rig.cache.mover, rig.trie, rig.rows([1, 2])[::-1]) == 0
    assert rig.tiers([1, 2], DISK) == [True, True], "and nothing else got their slots"
    assert await rig.get([1, 2]) == 2


async def test_forgetting_is_durable_and_spares_what_is_in_use(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=8)
    await rig.put([1, 2, 3], durable=True)
    await rig.put([1, 5], durable=True)
    lease = await rig.lease([1, 2])
    rows = subtree_rows(rig.trie, np.array(rig.rows([1])[:1]))
    assert await forget_blocks(rig.cache.mover, rig.trie, rows[::-1]) == 2
    assert (len(rig.rows([1, 2, 3])), len(rig.rows([1, 5]))) == (2, 1)
    assert lease is not None
    await rig.check_disk()
    await rig.restart()
    assert (len(rig.rows([1, 2, 3])), len(rig.rows([1, 5]))) == (2, 1)


async def test_frames_are_given_all_or_none(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4, cpu=1)
    held = await rig.put_gpu([1, 2])
    mover = rig.cache.mover
    with rig.nothing_lost():
        assert await mover.slots.take_frames(3) is None
    frames = await mover.slots.take_frames(2)
    assert frames is not None
    rig.own = frames
    rig.check()
    rig.cache.tiers.compute.free(frames)
    rig.own = []
    rig.unhold(held, rig.cache.tiers.compute)
    rig.own = await mover.slots.take_frames(4) or []
    assert len(rig.own) == 4
    assert len(rig.rows([1, 2])) == 1, "the CPU tier had room for one of them"


async def test_frames_that_cannot_all_be_had_cost_nobody_a_copy(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4, cpu=4)
    rig.unhold(await rig.put_gpu([5, 6]), rig.cache.tiers.compute)
    held = await rig.put_gpu([1, 2])
    assert await rig.cache.mover.slots.take_frames(3) is None  # two can be had, at the cost of the first prompt
    assert rig.tiers([5, 6], GPU) == [True, True]
    rig.unhold(held, rig.cache.tiers.compute)


async def test_recording_a_block_that_is_there_keeps_the_first_copy(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4)
    first = await rig.put_gpu([1, 2])
    slots = rig.trie.slots[first, GPU, 0].tolist()
    second = await rig.put_gpu([1, 2])
    assert second == first
    assert rig.trie.slots[first, GPU, 0].tolist() == slots
    assert rig.pool is not None and rig.pool.used_count == 2
    rig.unhold(first, rig.cache.tiers.compute)
    rig.unhold(second, rig.cache.tiers.compute)


async def test_an_engine_reads_what_the_worker_computed_and_the_other_way(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4)
    rig.unhold(await rig.put_gpu([1, 2]), rig.cache.tiers.compute)
    assert await rig.get([1, 2]) == 2
    await rig.put([3, 4])
    rows = np.array(rig.rows([3, 4]))
    rig.trie.hold(rows, GPU)
    assert await rig.cache.mover.bring(rig.trie, rows, rig.cache.tiers.compute) == 2
    frame = int(rig.trie.slots[rows[1], GPU, 0])
    assert rig.read(rig.frame(frame)) == rig.content(rig.namespace, rig.chain([3, 4]), 1)
    rig.unhold(rows.tolist(), rig.cache.tiers.compute)


async def test_sizes_share_the_arena(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16)
    large = rig.register("large", nbytes=8 * 4096)
    for prompt in range(16):
        await rig.put([prompt])
    assert await rig.put([1, 2], namespace=large) == (2, 0)
    assert await rig.get([1, 2], namespace=large) == 2
    assert await rig.put([7, 8, 9]) == (3, 0)
    assert await rig.get([7, 8, 9]) == 3


async def test_prefetch_brings_up_what_is_cached(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=3, disk=8)
    await rig.put([1, 2, 3], durable=True)
    await rig.put([7, 8, 9])
    assert await rig.cache.prefetch(rig.session, rig.namespace, rig.chain([1, 2, 3, 4])) == 3
    await rig.cache.mover.quiesce()
    assert rig.tiers([1, 2, 3], CPU) == [True] * 3
    assert await rig.cache.prefetch(rig.session, rig.namespace, rig.chain([1, 2, 3, 4])) == 0
    assert not rig.trie.keep[: rig.trie.rows].any()


async def test_colliding_keys_are_counted_and_never_served(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=64, disk=64, digest=lambda data, seed: bytes([sum(data) % 7]) * 16)
    served = 0
    for first in range(12):
        for second in range(3):
            await rig.put([first, second, 1])
            served += await rig.get([first, second, 1])
    assert rig.cache.mover.lost["key collision"] > 0
    assert served > 0
    await rig.cache.write_back.flush()
    await rig.restart()
    assert rig.restored > 0
    for first in range(12):
        await rig.get([first, 0, 1])


async def test_a_key_that_stands_in_another_namespace_takes_nothing(make_rig: MakeRig) -> None:
    """Somebody has found tokens whose key, in his namespace, is that of a victim's block, and stores it first."""
    rig = make_rig(cpu=16, disk=16, digest=lambda data, seed: bytes([data[-4] % 10]) * 16)
    thief = rig.register("thief")
    assert rig.cache.trie(thief) is rig.trie
    assert await rig.put([11, 12], namespace=thief, durable=True) == (2, 0)
    assert await rig.put([1, 2, 3], durable=True) == (3, 0)
    for _ in range(2):
        assert await rig.get([1, 2, 3]) == 3
        assert await rig.get([11, 12], namespace=thief) == 2
        assert (rig.rows([11, 12]), rig.rows([1, 2], thief)) == ([], [])
        await rig.restart()
        thief = rig.register("thief")
    assert "key collision" not in rig.cache.mover.lost
    await forget_blocks(rig.cache.mover, rig.trie, rig.rows([11, 12], thief)[::-1])
    await rig.check_disk()
    assert await rig.get([1, 2, 3]) == 3, "who has one key's block forgotten forgets no other's"


async def test_blocks_of_another_size_get_room_on_a_full_disk(make_rig: MakeRig) -> None:
    """Pages belong to one size at a time: those whose blocks are worth least go to the size that needs room."""
    rig = make_rig(cpu=64, disk=64)
    large = rig.register("large", nbytes=3 * rig.part_bytes)
    for prompt in range(64):
        await rig.put([100 + prompt], durable=True)
    assert len(rig.trie.copies(DISK)) == 64
    assert await rig.put([1, 2, 3, 4, 5], namespace=large, durable=True) == (5, 0)
    for prompt in range(30):
        assert await rig.put([prompt * 10, prompt * 10 + 1], namespace=large, durable=True) == (2, 0)
    await rig.check_disk()
    slots = len(rig.trie.copies(DISK)) + 3 * len(rig.cache.trie(large).copies(DISK))
    assert slots > 64 - 6, "what one size leaves, the other has: at most a page less than one more prompt is free"
    assert rig.cache.mover.lost == {}
    await rig.restart()
    large = rig.register("large", nbytes=3 * rig.part_bytes)
    assert await rig.get([290, 291], namespace=large) == 2


async def test_idle_waits_for_all_calls_that_hold_blocks(make_rig: MakeRig) -> None:
    mover = make_rig(cpu=4).cache.mover
    await asyncio.wait_for(mover.idle(), 10)
    with mover.working():
        with mover.working():
            waiting = asyncio.create_task(mover.idle())
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 10)


@pytest.mark.parametrize("disk", [0, 8])
async def test_a_block_larger_than_the_tier_is_refused_with_what_helps(make_rig: MakeRig, disk: int) -> None:
    rig = make_rig(cpu=2, disk=disk)
    large = rig.register("large", nbytes=3 * rig.part_bytes)
    with pytest.raises(ExhaustedError, match=r"12288 bytes does not fit into the CPU tier \(8192 bytes\).*raise cpu"):
        await rig.put([1], namespace=large)
