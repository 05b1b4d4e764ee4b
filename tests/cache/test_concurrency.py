"""Many callers at once: bytes are read once, and who dies or is cancelled half-way leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import pytest

from prefixd.base.errors import ExhaustedError, NotFoundError
from prefixd.cache import Reservation
from prefixd.cache.index.trie import CPU, DISK, GPU
from prefixd.cache.placement.movement import Movement
from prefixd_swap.eviction import POLICY_NAMES
from prefixd_swap.transfers import Urgency
from tests.rig import MakeRig, Rig
from tests.tries import forget_blocks, subtree_rows, used_rows
from tests.waiting import until


@contextmanager
def stopped(rig: Rig, name: str) -> Iterator[threading.Event]:
    """Holds up the store's `read_all` or `write` until the block ends; the event says that a call has begun."""
    assert rig.store is not None
    real: Callable[..., object] = getattr(rig.store, name)
    begun, go = threading.Event(), threading.Event()

    def wait(*args: object) -> object:
        begun.set()
        assert go.wait(60)
        return real(*args)

    setattr(rig.store, name, wait)
    try:
        yield begun
    finally:
        go.set()
        setattr(rig.store, name, real)


async def on_disk(rig: Rig, prompt: Sequence[int]) -> None:
    """The prompt's blocks, on disk only."""
    await rig.put(prompt, durable=True)
    taken = await rig.cache.mover.slots.allocate(
        rig.cache.tiers.shared, (4096,), rig.cache.tiers.arena.capacity_bytes // 4096
    )
    for slots in taken:
        rig.cache.tiers.shared.free(slots)
    assert not any(rig.tiers(prompt, CPU))


async def test_a_prefix_on_disk_is_read_once_for_all_who_ask(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=8)
    await on_disk(rig, [1, 2, 3])
    before = rig.ops.reads
    await rig.cache.prefetch(rig.session, rig.namespace, rig.chain([1, 2, 3]))
    found = await asyncio.gather(*map(rig.get, ([1, 2, 3], [1, 2], [1, 2, 3, 4], [1])))
    assert found == [3, 2, 3, 1]
    assert rig.ops.reads - before == 3
    assert rig.cache.tiers.counters[rig.cache.tiers.shared.level].promoted == 3


async def test_prompts_brought_up_at_once_are_all_counted(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=6, disk=16)
    prompts = [[1, 2], [3, 4, 5], [6]]
    for prompt in prompts:
        await rig.put(prompt, durable=True)
    await rig.restart()
    assert await asyncio.gather(*map(rig.get, prompts)) == [2, 3, 1]
    assert rig.cache.tiers.counters[rig.cache.tiers.shared.level].promoted == 6


async def test_a_session_that_ends_during_acquire_gets_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=8)
    await on_disk(rig, [1, 2])
    with rig.nothing_lost():
        doomed = rig.open_session()
        with stopped(rig, "read_all") as begun:
            acquire = asyncio.create_task(rig.cache.acquire(doomed, rig.namespace, rig.chain([1, 2])))
            await until(begun.is_set)
            rig.cache.leases.close(doomed)
        with pytest.raises(NotFoundError, match="is not open"):
            await acquire
    assert rig.tiers([1, 2], CPU) == [True, True], "what was read is there for the next one"


async def test_a_session_that_ends_during_reserve_gets_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=2, disk=8)
    await rig.put([1, 2])
    with rig.nothing_lost():
        doomed = rig.open_session()
        with stopped(rig, "write") as begun:
            reserve = asyncio.create_task(rig.cache.reserve(doomed, rig.namespace, rig.chain([1, 5])))
            await until(begun.is_set)
            rig.cache.leases.close(doomed)
        with pytest.raises(NotFoundError, match="is not open"):
            await reserve
    assert rig.rows([1, 2])


async def test_a_cancelled_acquire_does_not_disturb_the_read(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=8)
    await on_disk(rig, [1, 2])
    with rig.nothing_lost():
        with stopped(rig, "read_all") as begun:
            first = asyncio.create_task(rig.get([1, 2]))
            second = asyncio.create_task(rig.get([1, 2]))
            await until(begun.is_set)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        assert await second == 2
        await rig.cache.mover.quiesce()


async def test_a_cancelled_reserve_waits_for_the_write_that_makes_room(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=2, disk=8)
    await rig.put([1, 2])
    with rig.nothing_lost():
        with stopped(rig, "write") as begun:
            reserve = asyncio.create_task(rig.put([1, 5, 6]))
            await until(begun.is_set)
            reserve.cancel()
            await asyncio.sleep(0)
            assert not reserve.done(), "the thread still reads the slot that would be given away"
        with pytest.raises(asyncio.CancelledError):
            await reserve
        await rig.check_disk()
    assert await rig.get([1, 2]) == 2
    await rig.restart()
    assert rig.restored > 0, "what the thread wrote is known"


@pytest.mark.parametrize("turns", range(12))
async def test_take_frames_can_be_cancelled_anywhere(make_rig: MakeRig, turns: int) -> None:
    rig = make_rig(gpu=4, cpu=2, disk=2)
    rig.unhold(await rig.put_gpu([1, 2, 3, 4]), rig.cache.tiers.compute)
    await rig.put([7, 8])
    with rig.nothing_lost():
        take = asyncio.create_task(rig.cache.mover.slots.take_frames(3))
        for _ in range(turns):
            await asyncio.sleep(0)
        take.cancel()
        result = (await asyncio.gather(take, return_exceptions=True))[0]
        if isinstance(result, list):
            rig.cache.tiers.compute.free(result)
        await rig.check_disk()
    await rig.cache.mover.quiesce()  # what was cancelled may still let go of what it held
    frames = await rig.cache.mover.slots.take_frames(4)
    assert frames is not None
    rig.cache.tiers.compute.free(frames)


async def test_a_block_written_again_while_its_removal_waits_stays(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=8)
    await on_disk(rig, [1, 2])
    await rig.put([5])
    with stopped(rig, "write") as begun:
        flush = asyncio.create_task(rig.cache.write_back.flush())
        await until(begun.is_set)
        forget = asyncio.create_task(forget_blocks(rig.cache.mover, rig.trie, rig.rows([1, 2])[::-1]))
        again = asyncio.create_task(rig.put([1, 2], durable=True))
        await until(lambda: len(rig.cache.mover.disk._lock._waiting) == 2)
    assert (await flush, await forget, await again) == (1, 2, (2, 0))
    await rig.check_disk()
    assert rig.tiers([1, 2], DISK) == [True, True]


async def test_two_who_fill_the_same_blocks_both_succeed(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    both = [await rig.cache.reserve(rig.session, rig.namespace, rig.chain([1, 2, 3])) for _ in range(2)]
    results = []
    for reservation in both:
        assert isinstance(reservation, Reservation)
        rig.fill(reservation)
        results.append(await rig.cache.commit(reservation, 3))
    assert results == [(3, 0), (0, 3)]
    assert rig.cache.tiers.arena.pages.slots_used == 3


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", range(3))
async def test_engines_workers_and_operators_at_once(make_rig: MakeRig, policy: str, seed: int) -> None:
    rig = make_rig(gpu=6, cpu=8, disk=12, policy=policy, write_back=True)
    rig.start_write_back()
    dice = random.Random(seed)
    served = 0

    def prompt() -> list[int]:
        return [dice.randrange(3) for _ in range(dice.randint(1, 5))]

    async def engine() -> None:
        nonlocal served
        for _ in range(12):
            wanted = prompt()
            found = await rig.get(wanted)
            served += found
            with suppress(ExhaustedError):  # the others may hold all there is
                await rig.put(wanted, durable=dice.random() < 0.3)

    async def worker() -> None:
        mover, trie = rig.cache.mover, rig.trie
        for _ in range(12):
            wanted = prompt()[:3]
            chain = rig.chain(wanted)
            rows = await rig.cache.match(rig.namespace, chain)
            trie.hold(rows, GPU)
            rig.computed.update(rows.tolist())
            there = await mover.bring(trie, rows, rig.cache.tiers.compute)
            rig.unhold(rows[there:].tolist(), rig.cache.tiers.compute)
            for block, row in enumerate(rows[:there].tolist()):
                data = rig.read(rig.frame(int(trie.slots[row, GPU, 0])))
                assert data == rig.content(rig.namespace, chain, block)
            rig.unhold(rows[:there].tolist(), rig.cache.tiers.compute)
            frames = await mover.slots.take_frames(len(wanted))
            if frames is not None:
                rig.cache.tiers.compute.free(frames)
                rig.unhold(await rig.put_gpu(wanted), rig.cache.tiers.compute)

    async def operator() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
            rig.check()
            rows = used_rows(rig.trie).tolist()
            if rows:
                subtree = subtree_rows(rig.trie, np.array([dice.choice(rows)]))
                await forget_blocks(rig.cache.mover, rig.trie, subtree[::-1])
            await rig.cache.write_back.flush()

    async def dying() -> None:
        for _ in range(8):
            session = rig.open_session()
            wanted = rig.chain(prompt())
            work = [
                asyncio.create_task(rig.cache.acquire(session, rig.namespace, wanted)),
                asyncio.create_task(rig.cache.reserve(session, rig.namespace, wanted)),
            ]
            for _ in range(dice.randrange(6)):
                await asyncio.sleep(0)
            dice.choice(work).cancel()
            rig.cache.leases.close(session)
            await asyncio.gather(*work, return_exceptions=True)

    with rig.nothing_lost():
        await asyncio.wait_for(asyncio.gather(engine(), engine(), worker(), operator(), dying()), 100)
        await rig.cache.write_back.stop()
        await rig.check_disk()
    assert served > 0
    assert not rig.cache.mover.lost["checksum mismatch on disk"]


async def test_a_write_of_blocks_that_are_there_writes_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=4)
    await rig.put([1, 2], durable=True)
    assert rig.store is not None
    commits = rig.store.commits
    assert await rig.put([1, 2], durable=True) == (0, 0)
    rows = np.array(rig.rows([1, 2]))
    assert await rig.cache.mover.write(rig.trie, rows, rig.cache.tiers.shared) == 0
    assert await rig.cache.write_back.flush() == 0
    assert rig.store.commits == commits


async def test_what_is_let_go_while_room_is_sought_goes_down_and_does_not_vanish(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=2, disk=8)
    await rig.put([1, 2])
    mover = rig.cache.mover
    await mover.checksums.wait_for_all()
    held = [mover.placement.holds.hold("test", rig.trie, np.array(rig.rows([1, 2])), rig.cache.tiers.shared)]
    choose = mover.room._choose

    async def choose_and_let_go(*args: Any, **how: Any) -> Any:
        found = await choose(*args, **how)
        while held:
            held.pop().end()
        return found

    monkeypatch.setattr(mover.room, "_choose", choose_and_let_go)
    shared = rig.cache.tiers.shared
    for _ in range(2):  # the first is told that nothing may go, and that is so no more
        shared.free(await mover.slots.allocate(shared, (rig.part_bytes,), 2))
    assert rig.trie.nearest[rig.rows([1, 2])].tolist() == [DISK, DISK]
    assert not mover.lost


async def test_what_others_begin_and_end_to_hold_while_room_is_sought_is_looked_at_again(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=2, disk=8)
    await rig.put([1, 2])
    mover, shared = rig.cache.mover, rig.cache.tiers.shared
    await mover.checksums.wait_for_all()
    rows = np.array(rig.rows([1, 2]))
    held = [mover.placement.holds.hold("test", rig.trie, rows, shared)]
    choose = mover.room._choose

    async def choose_meanwhile(*args: Any, **how: Any) -> Any:
        with mover.room.under_way(shared, Movement(Urgency.WRITE_BACK)) if held else nullcontext():
            found = await choose(*args, **how)
            while held:
                held.pop().end()
        return found

    monkeypatch.setattr(mover.room, "_choose", choose_meanwhile)
    slots = await mover.slots.allocate(shared, (rig.part_bytes,), 2)
    assert len(slots) == 2
    shared.free(slots)
    assert rig.trie.nearest[rows].tolist() == [DISK, DISK]


@pytest.mark.parametrize("callers", [1, 2, 3])
async def test_callers_who_all_find_no_room_do_not_send_each_other_round(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, callers: int
) -> None:
    rig = make_rig(cpu=4, disk=8)
    await rig.put([1])
    for prompt in ([2], [3], [4]):
        await rig.put(prompt)
    mover, shared = rig.cache.mover, rig.cache.tiers.shared
    await mover.checksums.wait_for_all()
    rig.trie.pinned[[rig.rows([key])[0] for key in (1, 2, 3, 4)]] = True
    copies = 0

    async def copy(*args: object, ahead: bool) -> int:
        nonlocal copies
        copies += 1
        assert copies <= 4 * callers
        await asyncio.sleep(0.04)
        return 0

    monkeypatch.setattr(mover.room, "copy", copy)

    async def ask(caller: int) -> int:
        await asyncio.sleep(0.01 * caller)
        return len(await mover.slots.allocate(shared, (rig.part_bytes,), 1))

    assert await asyncio.wait_for(asyncio.gather(*map(ask, range(callers))), 60) == [0] * callers
