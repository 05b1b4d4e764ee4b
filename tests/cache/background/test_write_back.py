"""Blocks go down before anybody needs their room, and the background comes to rest."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from prefixd.base.rules.rules import SlidingWindow
from prefixd.cache import NamespaceSpec, PartSpec, Reservation
from prefixd.cache.index.trie import CPU, DISK, NO_SLOT
from prefixd.server.services.admin_service import AdminService
from prefixd.v1 import admin_pb2 as pb
from tests.rig import BLOCK_TOKENS, PART_BYTES, MakeRig, Rig
from tests.tries import forget_blocks
from tests.waiting import until


async def rest(rig: Rig) -> None:
    """Runs write-back batches until it would wait for news; fails when it never would."""
    changed = rig.cache.mover.changed
    for _ in range(50):
        if not changed.is_set():
            return
        changed.clear()
        while await rig.cache.write_back._batch():
            pass
    raise AssertionError("write back keeps giving itself work")


async def test_blocks_reach_the_disk_without_being_asked(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=8, write_back=True)
    rig.start_write_back()
    await rig.put([1, 2, 3])
    await until(lambda: all(rig.tiers([1, 2, 3], DISK)))
    await rig.put([1, 2, 4])
    await until(lambda: all(rig.tiers([1, 2, 4], DISK)))
    await rig.cache.write_back.stop()
    await rig.check_disk()
    await rig.restart()
    assert await rig.get([1, 2, 3]) == 3
    assert await rig.get([1, 2, 4]) == 3


@pytest.mark.parametrize("alone", [False, True])
async def test_prompts_written_together_lie_apart_on_disk(make_rig: MakeRig, alone: bool) -> None:
    """Each in adjacent slots, so that few reads load it."""
    rig = make_rig(cpu=16, disk=16, write_back=True)
    await rig.put([1, 2, 3, 4])
    await rig.put([5, 6, 7, 8])
    await rig.put([1, 2, 9])
    if alone:
        await rest(rig)
    else:
        await rig.cache.write_back.flush()
    slots = rig.trie.slots[: rig.trie.rows, DISK, 0]
    place = np.argsort(np.argsort(slots))
    for blocks in ([1, 2, 3, 4], [5, 6, 7, 8]):
        assert (slots[rig.rows(blocks)] != NO_SLOT).all()
        assert (np.diff(place[rig.rows(blocks)]) == 1).all()


async def test_switched_off_it_leaves_only_flush(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=8, write_back=False)
    rig.start_write_back()
    await rig.put([1, 2])
    assert rig.store is not None and rig.store.commits == 0
    assert await rig.cache.write_back.flush() == 2
    assert await rig.cache.write_back.flush() == 0
    assert all(rig.tiers([1, 2], DISK))


async def test_a_flush_tells_its_bytes_where_it_evicts_as_many(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=4)
    await rig.put([1, 2, 3, 4], durable=True)
    await rig.put([5, 6, 7])
    unused: Any = None
    service = AdminService(rig.cache, *[unused] * 4, tenants=unused, audit=unused, why=unused)
    flushed = await service.Flush(pb.FlushRequest(), unused)
    assert (flushed.blocks, flushed.nbytes) == (3, 3 * PART_BYTES)
    assert (flushed.left_blocks, flushed.left_bytes) == (3, 3 * PART_BYTES), "[2, 3, 4]: 4 of 7 fit"
    rig.clock.now += 1
    again = await service.Flush(pb.FlushRequest(), unused)
    assert (again.blocks, again.left_blocks) == (0, 3), "nothing changes places"


async def test_flush_without_a_disk_writes_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    await rig.put([1, 2])
    assert await rig.cache.write_back.flush() == 0


async def test_it_rests_when_the_disk_is_smaller_than_the_cpu_tier(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16, disk=4, write_back=True)
    for prompt in range(6):
        await rig.put([prompt, 100])
        await rest(rig)
    assert rig.store is not None
    commits = rig.store.commits
    for prompt in range(6):
        assert await rig.get([prompt, 100]) == 2
    rig.cache.mover.changed.set()
    await rest(rig)
    assert rig.store.commits == commits, "a full disk of copies is no reason to write"
    assert not rig.cache.mover.lost, "what stays in the CPU tier is not lost"


async def test_what_lives_on_disk_alone_gives_way_to_what_is_newer(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=4, write_back=True)
    await rig.put([1, 2, 3, 4])
    await rest(rig)
    await rig.put([5, 6, 7, 8])
    await rest(rig)
    assert rig.rows([1, 2, 3, 4]) == []
    assert rig.tiers([5, 6, 7, 8], DISK) == [True] * 4


async def test_an_eighth_of_the_gpu_tier_is_kept_clean(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=16, cpu=8, write_back=True)
    for prompt in range(8):
        rig.unhold(await rig.put_gpu([prompt, 50]), rig.cache.tiers.compute)
    await rest(rig)
    assert [rig.tiers([prompt, 50], CPU) for prompt in range(8)] == [[True, True]] + [[False, False]] * 7
    moved = rig.cache.tiers.counters[rig.cache.tiers.compute.level].demoted
    frames = await rig.cache.mover.slots.take_frames(2)
    assert frames is not None
    assert rig.cache.tiers.counters[rig.cache.tiers.compute.level].demoted == moved, "their eviction needs no copy"
    rig.cache.tiers.compute.free(frames)


@pytest.mark.parametrize("disk", [0, 2])
async def test_it_rests_when_the_cpu_tier_is_smaller_than_the_clean_share(make_rig: MakeRig, disk: int) -> None:
    rig = make_rig(gpu=32, cpu=2, disk=disk, write_back=True)
    for prompt in range(32):
        rig.unhold(await rig.put_gpu([prompt]), rig.cache.tiers.compute)
    await rest(rig)
    evicted = rig.cache.tiers.counters[rig.cache.tiers.shared.level].evicted
    rig.cache.mover.changed.set()
    await rest(rig)
    assert rig.cache.tiers.counters[rig.cache.tiers.shared.level].evicted == evicted, (
        "one copy ahead of need must not cost another"
    )
    assert sum(rig.tiers([prompt], CPU)[0] for prompt in range(32)) == 2


async def test_it_rests_and_lets_others_run_when_the_cpu_tier_is_leased(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=8, cpu=2, write_back=True)
    await rig.put([1, 2])
    lease = await rig.lease([1, 2])
    rig.start_write_back()
    for prompt in range(10, 18):
        rig.unhold(await rig.put_gpu([prompt]), rig.cache.tiers.compute)
    for _ in range(20):
        await asyncio.sleep(0)
    await until(lambda: not rig.cache.mover.changed.is_set())
    assert lease is not None
    await asyncio.wait_for(rig.cache.write_back.stop(), 60)


async def test_a_small_disk_keeps_beginnings_not_ends(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=80, disk=4)
    prompt = list(range(70))
    await rig.put(prompt)
    assert await rig.cache.write_back.flush() == 4
    assert rig.tiers(prompt, DISK) == [True] * 4 + [False] * 66
    assert rig.cache.mover.lost["not written: no room on disk"] > 0
    await rig.restart()
    assert await rig.get(prompt) == 4


async def test_a_flush_makes_room_at_the_cost_of_other_prompts(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=4)
    await rig.put([1, 2, 3, 4], durable=True)
    await rig.put([5, 6, 7], durable=True)
    assert rig.tiers([5, 6, 7], DISK) == [True] * 3
    assert rig.tiers([1, 2, 3, 4], DISK) == [True, False, False, False]
    assert rig.tiers([1, 2, 3, 4], CPU) == [True] * 4
    await rig.restart()
    assert (await rig.get([1, 2, 3, 4]), await rig.get([5, 6, 7])) == (1, 3)


async def test_what_a_flush_has_evicted_gets_the_room_that_is_left(make_rig: MakeRig) -> None:
    """For a block of nine slots a full tier lets twelve blocks of one slot go, of which three fit in again."""
    rig = make_rig(cpu=128, disk=64)
    large = rig.register("large", nbytes=9 * rig.part_bytes)
    rig.session.namespaces[large.id] = large
    prompt = list(range(64))
    await rig.put(prompt, durable=True)
    await rig.put([7], namespace=large)
    assert await rig.cache.write_back.flush() == 1 + 3
    assert rig.tiers(prompt, DISK) == [True] * 55 + [False] * 9
    assert len(rig.rows(prompt)) == 64
    await rig.restart()
    assert await rig.get(prompt) == 55


async def test_a_second_flush_has_no_blocks_change_places(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16, disk=4)
    for prompt in range(8):
        await rig.put([prompt])
    rig.clock.now += 1
    await rig.cache.write_back.flush()
    there = [rig.tiers([prompt], DISK) for prompt in range(8)]
    assert there.count([True]) == 4
    rig.clock.now += 1
    assert rig.store is not None
    commits = rig.store.commits
    assert await rig.cache.write_back.flush() == 0
    assert rig.store.commits == commits
    assert [rig.tiers([prompt], DISK) for prompt in range(8)] == there
    await rig.put([8])
    assert await rig.cache.write_back.flush() == 1, "what came since the last one"
    assert rig.tiers([8], DISK) == [True]


async def test_a_flush_after_one_that_failed_writes_everything(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=8)
    await rig.put([1, 2])
    rig.ops.fail = OSError(5, "Input/output error")
    assert await rig.cache.write_back.flush() == 0
    rig.ops.fail = None
    rig.clock.now += 60
    assert await rig.cache.write_back.flush() == 2


async def test_a_block_whose_parent_has_left_the_disk_is_written_with_a_record_of_it(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=8)
    await rig.put([1, 2, 3])
    rows = np.array(rig.rows([1, 2, 3]))
    shared, mover = rig.cache.tiers.shared, rig.cache.mover
    with mover.placement.holds.hold("flush", rig.trie, rows[2:], shared):
        assert await mover.write(rig.trie, rows[2:], shared) == 1
    await rig.check_disk()
    await rig.restart()
    assert rig.store is not None and not rig.store.recovery.lost
    await rig.put([1, 2])
    assert await rig.get([1, 2, 3]) == 3


async def test_without_a_shared_tier_a_record_of_the_parent_is_written_too(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=8, cpu=0, disk=8)
    rig.unhold(await rig.put_gpu([1, 2, 3]), rig.cache.tiers.compute)
    rows = np.array(rig.rows([1, 2, 3]))
    compute, mover = rig.cache.tiers.compute, rig.cache.mover
    with mover.placement.holds.hold("flush", rig.trie, rows[2:], compute):
        assert await mover.write(rig.trie, rows[2:], compute) == 1
    await rig.check_disk()
    await rig.restart()
    assert rig.store is not None and not rig.store.recovery.lost


async def test_a_block_without_room_has_a_record_for_those_that_continue_it(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=2)
    await rig.put([8, 9], durable=True)
    rig.trie.pinned[rig.rows([8, 9])] = True
    await rig.put([1, 2, 3])
    rows, shared = np.array(rig.rows([1, 2, 3])), rig.cache.tiers.shared
    with rig.cache.holds.hold("flush", rig.trie, rows, shared):
        assert await rig.cache.mover.write(rig.trie, rows[[0, 2]], shared) == 0
    await rig.check_disk()
    rig.trie.pinned[rig.rows([8, 9])] = False
    await rig.restart()
    assert rig.store is not None and rig.store.recovery.lost_parents == 0


async def test_a_small_block_does_not_go_to_disk_without_its_parent(make_rig: MakeRig) -> None:
    """There is room for the one part of it that is wanted, and not for both of its parent's."""
    rig = make_rig(cpu=8, disk=3)
    window = SlidingWindow(2 * BLOCK_TOKENS + 1)
    spec = NamespaceSpec(
        "hybrid", BLOCK_TOKENS, (PartSpec("full", 0, PART_BYTES), PartSpec("window", 0, PART_BYTES, window))
    )
    home = rig.cache.register(spec)
    rig.session.namespaces[home.id] = home
    await rig.put([8, 9], durable=True)
    rig.trie.pinned[rig.rows([8, 9])] = True
    await rig.put([1, 2], namespace=home)
    trie, rows, shared = rig.cache.trie(home), np.array(rig.rows([1, 2], home)), rig.cache.tiers.shared
    placement = rig.cache.mover.placement
    before = placement.to_write(trie, rows)
    trie.expired[rows[1:]] = trie.groups[1].mask
    placement._count_queue(trie, rows, before)
    with rig.cache.holds.hold("flush", trie, rows, shared):
        await rig.cache.mover.write(trie, rows, shared)
    assert trie.slots[rows, DISK].tolist()[0] == [NO_SLOT, NO_SLOT] and trie.slots[rows[1], DISK, 0] != NO_SLOT
    await rig.check_disk()
    rig.trie.pinned[rig.rows([8, 9])] = False
    await rig.restart()
    assert rig.store is not None and rig.store.recovery.lost_parents == 0


async def test_what_new_blocks_continue_was_used_no_earlier_than_they(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    await rig.put([1, 2])
    await rig.put([1, 2, 3, 4])
    assert len(set(rig.trie.last_used[rig.rows([1, 2, 3, 4])].tolist())) == 1


async def test_flush_takes_gpu_blocks_too(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4, cpu=2, disk=8)
    rig.unhold(await rig.put_gpu([1, 2, 3]), rig.cache.tiers.compute)
    assert await rig.cache.write_back.flush() == 3
    await rig.restart()
    assert await rig.get([1, 2, 3]) == 2, "as much as the CPU tier takes"


async def test_an_error_does_not_end_it(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd.cache.disk.health.FIRST_PROBE_S", 0.01)
    rig = make_rig(cpu=8, disk=8, write_back=True)
    rig.ops.fail = OSError(5, "Input/output error")
    rig.start_write_back()
    await rig.put([1, 2])
    await until(lambda: bool(rig.cache.tiers.troubles.what("disk tier")))
    assert await rig.get([1, 2]) == 2, "the rest goes on"
    rig.ops.fail = None
    await until(lambda: all(rig.tiers([1, 2], DISK)))
    assert not rig.cache.tiers.troubles.what("disk tier")


async def test_it_ends_at_once_while_it_waits_to_try_again(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd.cache.background.write_back._RETRY_S", 3600.0)
    rig = make_rig(cpu=8, disk=8, write_back=True)
    rig.ops.fail = OSError(5, "Input/output error")
    rig.start_write_back()
    await rig.put([1, 2])
    await until(lambda: bool(rig.cache.tiers.troubles.what("disk tier")))
    await asyncio.wait_for(rig.cache.write_back.stop(), 60)
    assert rig.tiers([1, 2], DISK) == [False, False]


async def test_who_finds_no_room_waits_for_what_write_back_holds(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=2, disk=8, write_back=True)
    rig.start_write_back()
    async with rig.cache.mover.disk.still():  # so write-back waits, and holds both blocks
        await rig.put([1, 2])
        holds = rig.cache.holds
        await until(lambda: holds.blocks_by_owner()["write-back"] == 2)
        waiting = asyncio.create_task(rig.put([3, 4]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting == (2, 0)
    assert await rig.get([1, 2]) == 2


@pytest.mark.parametrize("event", ["unpin", "evict", "release"])
async def test_what_waits_for_room_on_disk_is_written_once_there_is_some(make_rig: MakeRig, event: str) -> None:
    rig = make_rig(cpu=4, disk=4, write_back=True)
    rig.start_write_back()
    await rig.put([1, 2, 3, 4], durable=True)
    kept, pins = np.array(rig.rows([1, 2, 3, 4])), rig.cache.pins
    reservation = None
    if event == "release":
        reservation = await rig.cache.reserve(rig.session, rig.namespace, rig.chain([1, 2, 3, 4, 5]))
    else:
        await pins.pin(rig.trie, kept)
    await rig.put([6, 7, 8])
    changed = rig.cache.mover.changed
    await until(lambda: not (changed.is_set() or rig.cache.write_back._working))
    assert rig.cache.mover.queued[0] == 3
    if event == "unpin":
        await pins.unpin(rig.trie, kept)
    elif event == "evict":
        rig.trie.pinned[kept] = False  # without a word, so that it is not the unpinning that wakes it
        assert await forget_blocks(rig.cache.mover, rig.trie, kept[::-1].tolist()) == 4
    else:
        assert isinstance(reservation, Reservation)
        rig.cache.release(rig.session, reservation.id)
    await until(lambda: all(rig.tiers([6, 7, 8], DISK)))
    assert rig.cache.mover.queued == (0, 0)
