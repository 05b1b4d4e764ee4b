"""The queue of blocks for the disk: bounded, pushing back, and never for ever."""

from __future__ import annotations

import asyncio
import threading

import pytest

from prefixd.cache import Reservation
from prefixd.cache.background.forgetting import find_subtree, forget
from prefixd.cache.index.trie import CPU, DISK
from prefixd_swap import StorageError
from tests.cache.tenants.tenant_rig import Home
from tests.rig import MakeRig
from tests.waiting import until


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_full_queue_makes_reserve_wait_until_the_disk_has_caught_up(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=16, disk=64, write_back=True, write_queue=2)
    go = threading.Event()
    monkeypatch.setattr(rig.ops, "fdatasync", lambda fd: go.wait(30))
    rig.start_write_back()
    await rig.put([1, 2, 3, 4])
    assert rig.cache.mover.queued == (4, 4 * rig.part_bytes)
    waiting = asyncio.create_task(rig.cache.reserve(rig.session, rig.namespace, rig.chain([5])))
    await turns()
    assert not waiting.done()
    assert rig.cache.write_back.pushed_back == 1
    go.set()
    reservation = await waiting
    assert isinstance(reservation, Reservation)
    assert rig.cache.mover.queued == (0, 0)
    rig.cache.release(rig.session, reservation.id)


async def test_who_waits_for_a_durable_commit_goes_on_when_enough_of_it_is_written(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=64, disk=128, write_back=True, write_queue=6)
    monkeypatch.setattr("prefixd.cache.moving.mover._DURABLE_BYTES", 2 * rig.part_bytes)
    syncs, begun = threading.Semaphore(0), list[int]()

    def sync(fd: int) -> None:
        begun.append(fd)
        syncs.acquire(timeout=30)

    monkeypatch.setattr(rig.ops, "fdatasync", sync)
    rig.start_write_back()
    commit = asyncio.create_task(rig.put(range(12), durable=True))
    await until(lambda: bool(begun))
    waiting = asyncio.create_task(rig.cache.reserve(rig.session, rig.namespace, rig.chain([50])))
    await turns()
    assert not waiting.done()
    while rig.cache.mover.queued[0] >= 6:
        before = len(begun)
        syncs.release()
        await until(lambda before=before: len(begun) > before)  # type: ignore[misc]
    reservation = await asyncio.wait_for(waiting, 20)
    assert not commit.done(), "the last pieces are not written yet"
    assert isinstance(reservation, Reservation)
    rig.cache.release(rig.session, reservation.id)
    syncs.release(100)
    assert await commit == (12, 0)


async def test_what_a_cancelled_commit_has_entered_is_written(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=16, disk=64, write_back=True)
    monkeypatch.setattr("prefixd.cache.sessions.reservations._COMMIT_BLOCKS", 2)
    rig.start_write_back()
    reservation = await rig.cache.reserve(rig.session, rig.namespace, rig.chain(range(8)))
    assert isinstance(reservation, Reservation)
    rig.fill(reservation)
    commit = asyncio.create_task(rig.cache.commit(reservation, 8))
    while not rig.rows(range(8)):
        await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    assert 0 < len(rig.rows(range(8))) < 8
    await until(lambda: rig.cache.mover.queued[0] == 0 and all(rig.tiers(range(8), DISK)))


async def test_nobody_waits_for_a_disk_that_is_out_of_service(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16, disk=64, write_back=True, write_queue=2)
    rig.ops.fail = OSError(5, "Input/output error")
    rig.start_write_back()
    for prompt in range(6):
        assert await asyncio.wait_for(rig.put([prompt, 9]), 30) == (2, 0)
    assert rig.cache.mover.queued[0] == 12


async def test_nobody_waits_for_a_disk_that_has_no_room(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16, disk=4, write_back=True, write_queue=2)
    rig.start_write_back()
    for prompt in range(7):
        assert await asyncio.wait_for(rig.put([prompt, 9]), 30) == (2, 0)


async def test_the_queue_counts_what_is_in_memory_and_not_on_disk(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=8)
    size = rig.part_bytes
    assert rig.cache.mover.queued == (0, 0)
    await rig.put([1, 2])
    assert rig.cache.mover.queued == (2, 2 * size)
    await rig.put([3], durable=True)
    assert rig.cache.mover.queued == (2, 2 * size)
    async for _ in forget(rig.cache.mover, await find_subtree(rig.trie, rig.rows([1])[0])):
        pass
    assert rig.cache.mover.queued == (0, 0)
    assert rig.cache.mover.lost == {"removed before it was written": 2}
    await rig.put([5, 6, 7])
    assert await rig.cache.write_back.flush() == 3
    assert rig.cache.mover.queued == (0, 0)
    assert rig.cache.write_back.written == 3
    await rig.restart()
    assert rig.cache.mover.queued == (0, 0)


async def test_without_a_disk_there_is_no_queue(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, write_back=True, write_queue=0)
    rig.start_write_back()
    await rig.put([1, 2])
    await asyncio.wait_for(rig.put([3, 4]), 30)
    assert rig.cache.mover.queued == (0, 0)


async def test_who_waits_is_let_go_when_write_back_stops(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(cpu=16, disk=64, write_back=True, write_queue=2)
    failed = asyncio.Event()

    async def fail() -> bool:
        failed.set()
        raise StorageError("by the test")

    monkeypatch.setattr(rig.cache.write_back, "_batch", fail)
    rig.start_write_back()
    await rig.put([1, 2, 3, 4])
    await failed.wait()
    rig.cache.mover.changed.set()
    waiting = asyncio.create_task(rig.cache.reserve(rig.session, rig.namespace, rig.chain([5])))
    await turns()
    assert not waiting.done()
    await rig.cache.write_back.stop()
    reservation = await asyncio.wait_for(waiting, 30)
    assert isinstance(reservation, Reservation)
    rig.cache.release(rig.session, reservation.id)


async def test_whose_blocks_fill_the_queue_waits_and_others_do_not(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=32, disk=64, write_back=True, write_queue=6)
    a, b = Home(rig, "a"), Home(rig, "b")
    go = threading.Event()
    monkeypatch.setattr(rig.ops, "fdatasync", lambda fd: go.wait(30))
    rig.start_write_back()
    await a.put(range(8))
    waiting = asyncio.create_task(a.reserve([10]))
    await turns()
    assert not waiting.done()
    assert await asyncio.wait_for(b.put([1]), 20) == (1, 0), "b has its own part of the queue"
    assert rig.cache.write_back.pushed_back == 1
    go.set()
    a.release(await waiting)
    assert rig.cache.mover.queued[0] <= 1, "a was let go when its blocks were written"


async def test_blocks_that_the_disk_has_no_room_for_are_in_nobodys_way(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=32, disk=16, write_back=True, write_queue=6)
    a, b = Home(rig, "a", {DISK: (0, 2)}), Home(rig, "b")
    rig.start_write_back()
    await a.put(range(12))
    await until(lambda: a.has(range(12), DISK) == 2 and not rig.cache.write_back._working)
    assert rig.cache.mover.queued[0] == 10, "more than the queue takes"
    go = threading.Event()
    monkeypatch.setattr(rig.ops, "fdatasync", lambda fd: go.wait(30))
    await b.put([1, 2])
    await until(lambda: rig.cache.write_back._working)
    assert await asyncio.wait_for(b.put([3]), 20) == (1, 0)
    assert await asyncio.wait_for(a.put([20]), 20) == (1, 0), "a does not wait for what cannot come"
    assert rig.cache.write_back.pushed_back == 0
    go.set()
    await until(lambda: b.has([1, 2], DISK) == 2 and b.has([3], DISK) == 1)
    assert a.has(range(12), CPU) == 12, "nothing of it was lost"
    a.limit({})
    rig.cache.mover.changed.set()
    await until(lambda: a.has(range(12), DISK) == 12 and not rig.cache.placement.without_room)
