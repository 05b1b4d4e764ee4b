"""The audit sees whatever does not add up, and nothing where everything does, while the cache works too."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from prefixd.base.errors import ExhaustedError
from prefixd.cache import Lease, Reservation
from prefixd.cache.audit import integrity_disk, integrity_trie
from prefixd.cache.audit.integrity import audit
from prefixd.cache.index.trie import CPU, DISK
from prefixd_swap import IntegrityError, StorageError
from tests.rig import BLOCK_TOKENS, MakeRig, Rig
from tests.tries import forget_blocks, used_rows


async def filled(make_rig: MakeRig) -> Rig:
    rig = make_rig(gpu=4, cpu=16, disk=32)
    await rig.put([1, 2, 3], durable=True)
    await rig.put([1, 4], durable=True)
    return rig


async def test_everything_is_counted(make_rig: MakeRig) -> None:
    rig = await filled(make_rig)
    lease = await rig.lease([1, 2])
    given = await rig.cache.reserve(rig.session, rig.namespace, rig.chain([7, 8]))
    assert isinstance(lease, Lease) and isinstance(given, Reservation)
    rig.unhold(await rig.put_gpu([5]), rig.cache.tiers.compute)
    found = await audit(rig.cache)
    assert found.violations == []
    assert (found.blocks, found.slots, found.sessions, found.leases, found.reservations) == (5, 4 + 2 + 1, 1, 1, 1)


Break = Callable[["Rig", list[int]], Callable[[], None]]


def column(name: str, value: Any, *index: int) -> Break:
    """Writes `value` into a column of the trie; undone by writing back what was there."""

    def breaks(rig: Rig, rows: list[int]) -> Callable[[], None]:
        array = getattr(rig.trie, name)
        at = (rows[1], *index)
        before = array[at].copy()
        array[at] = value
        return lambda: array.__setitem__(at, before)

    return breaks


def loose_slot(rig: Rig, rows: list[int]) -> Callable[[], None]:
    slot = int(rig.cache.tiers.shared.allocate([rig.part_bytes], 1)[0, 0])
    return lambda: rig.cache.tiers.shared.free([slot])


def leaked_slot(rig: Rig, rows: list[int]) -> Callable[[], None]:
    undo = loose_slot(rig, rows)
    leaked = dict(rig.cache.tiers.shared.in_flight)
    rig.cache.tiers.shared.in_flight.clear()

    def back() -> None:
        rig.cache.tiers.shared.in_flight.update(leaked)
        undo()

    return back


def freed_slot(rig: Rig, rows: list[int]) -> Callable[[], None]:
    slot = int(rig.trie.slots[rows[1], CPU, 0])
    rig.cache.tiers.arena.pages.free(slot)
    return lambda: None if rig.cache.tiers.arena.pages.allocate(rig.part_bytes) == slot else pytest.fail("another slot")


def held_by_nobody(rig: Rig, rows: list[int]) -> Callable[[], None]:
    some = np.array(rows[:1], np.int64)
    rig.trie.hold(some, DISK)
    return lambda: rig.trie.unhold(some, DISK)


def kept_by_nobody(rig: Rig, rows: list[int]) -> Callable[[], None]:
    some = np.array(rows[:1], np.int64)
    rig.trie.retain(some)
    return lambda: rig.trie.unretain(some)


def lost_lease(rig: Rig, rows: list[int]) -> Callable[[], None]:
    hold = rig.cache.holds.hold("lease 1-x", rig.trie, np.array(rows, np.int64), rig.cache.tiers.shared)
    rig.session.grants["1-x"] = Lease("1-x", rig.session, hold, 2000.0)
    rig.trie.unhold(hold.rows, CPU)

    def undo() -> None:
        rig.trie.hold(hold.rows, CPU)
        rig.session.grants.clear()
        hold.end()

    return undo


def miscounted_tenant(rig: Rig, rows: list[int]) -> Callable[[], None]:
    use, one = rig.cache.mover.use, np.array(rows[:1], np.int64)
    slots = rig.trie.slots[one, DISK]
    use.count_cached(rig.trie, one, rig.durable, slots, 1)
    return lambda: use.count_cached(rig.trie, one, rig.durable, slots, -1)


def miscounted_stored(rig: Rig, rows: list[int]) -> Callable[[], None]:
    stored, one = rig.cache.mover.use.stored, np.array(rows[:1], np.int64)
    stored.count(rig.trie, one, np.zeros(1, np.int64), np.ones((1, 1), np.bool_), 1)
    return lambda: stored.count(rig.trie, one, np.zeros(1, np.int64), np.ones((1, 1), np.bool_), -1)


def miscounted_account(rig: Rig, rows: list[int]) -> Callable[[], None]:
    account = rig.cache.mover.use.granted(rig.cache.tenants.default, rig.cache.tiers.compute)
    account.add(1)
    return lambda: account.add(-1)


def miscounted_session(rig: Rig, rows: list[int]) -> Callable[[], None]:
    rig.session.reserved.nbytes += 1

    def undo() -> None:
        rig.session.reserved.nbytes -= 1

    return undo


def miscounted_holders(rig: Rig, rows: list[int]) -> Callable[[], None]:
    holders = rig.cache.mover.use.held.holders(rig.trie, rig.cache.tiers.shared)
    holders[rows[0], 0] += 1
    return lambda: holders.__setitem__((rows[0], 0), 0)


def miscounted_held_bytes(rig: Rig, rows: list[int]) -> Callable[[], None]:
    use, shared, one = rig.cache.mover.use, rig.cache.tiers.shared, np.array(rows[:1], np.int64)
    use.held.change(rig.trie, shared, one, None, begin=True)
    use.held.holders(rig.trie, shared)[one] = 0

    def undo() -> None:
        use.held.holders(rig.trie, shared)[one] = 1
        use.held.change(rig.trie, shared, one, None, begin=False)

    return undo


def miscounted_queue(rig: Rig, rows: list[int]) -> Callable[[], None]:
    rig.cache.mover.placement.queued_blocks += 1

    def undo() -> None:
        rig.cache.mover.placement.queued_blocks -= 1

    return undo


def miscounted_queued_bytes(rig: Rig, rows: list[int]) -> Callable[[], None]:
    queued, default = rig.cache.mover.placement.queued_bytes_of, rig.cache.tenants.default
    queued[default] += 1
    return lambda: queued.subtract({default: 1})


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (column("parent", 77), "continue a block that does not exist"),
        (column("namespace", 5), "another namespace"),
        (column("depth", 9), "wrong depth"),
        (column("children", 3), "miscount their children"),
        (column("first_child", -1), "linked wrongly to their siblings or children"),
        (column("next_sibling", ~2), "linked wrongly to their siblings or children"),
        (column("previous_sibling", ~0), "linked wrongly to their siblings or children"),
        (column("any_part", 0), "marked wrongly for the cpu tier"),
        (column("nearest", 2), "wrong nearest tier"),
        (column("tier_children", 4, DISK), "miscount their children in the disk tier"),
        (column("holds", -1, CPU), "released more often than held in the cpu tier"),
        (column("slots", 0, CPU, 0), "slots with several owners"),
        (loose_slot, "slots in flight that no reservation or request has"),
        (leaked_slot, "allocated slots without an owner"),
        (freed_slot, "slots with an owner that are not allocated"),
        (held_by_nobody, "held in the disk tier without a hold"),
        (kept_by_nobody, "counted as kept without a hold"),
        (lost_lease, "not counted as held in the cpu tier"),
        (miscounted_tenant, "tenant default has 16384 bytes of blocks in the disk tier, and 20480 are counted"),
        (
            miscounted_stored,
            "of tenant default 16384 bytes are stored in the disk tier, .*, and 20480 and 20480 are",
        ),
        (miscounted_account, "tenant default, granted: 0 bytes are in flight in the gpu tier, and 1 are counted"),
        (miscounted_session, "session .*: 0 bytes are in flight in the cpu tier, and 1 are counted"),
        (miscounted_holders, "rows of which holders are miscounted in the cpu tier"),
        (miscounted_queue, "1 blocks, bytes by tenant {}, are counted as waiting to be written to disk, not 0, {}"),
        (miscounted_queued_bytes, "bytes by tenant {'default': 1}, are counted as waiting .*, not 0, {}"),
        (miscounted_held_bytes, "tenant default holds 0 bytes of blocks in the cpu tier, and 4096 are counted"),
    ],
)
async def test_each_contradiction_is_seen(make_rig: MakeRig, breaks: Break, words: str) -> None:
    rig = await filled(make_rig)
    undo = breaks(rig, rig.rows([1, 2, 3]))
    with pytest.raises(IntegrityError, match=words):
        rig.check()
    assert any(re.search(words, violation) for violation in (await audit(rig.cache)).violations)
    undo()
    assert (await audit(rig.cache)).violations == []


async def test_slices_see_what_the_whole_sees(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity_trie, "_SLICE_ROWS", 2)
    monkeypatch.setattr(integrity_disk, "SLICE_ROWS", 2)
    rig = await filled(make_rig)
    await rig.put([5, 6, 7, 8], durable=True)
    assert (await audit(rig.cache)).violations == []
    depths = rig.trie.depth[: rig.trie.rows].copy()
    rig.trie.depth[: rig.trie.rows] += 7
    found = await audit(rig.cache)
    assert found.blocks == 8
    (line,) = found.violations  # rows of all slices in one line; those that continue others are right about that
    assert line == "trie 0: rows with a wrong depth: " + ", ".join(map(str, used_rows(rig.trie)[depths == 0]))
    rig.trie.depth[: rig.trie.rows] = depths
    rig.trie.checksums[rig.rows([5, 6, 7, 8]), 0] ^= np.uint64(1)
    (line,) = (await audit(rig.cache)).violations
    assert "differs from memory" in line and line.endswith("and 1 more")


async def test_the_audit_of_many_blocks_lets_others_run(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4)
    rows = rig.trie.take_rows(100_000)
    keys = np.random.default_rng(0).integers(0, 256, (len(rows), 16), np.uint8)
    zeros, tokens = np.zeros(len(rows), np.int64), np.zeros((len(rows), BLOCK_TOKENS), np.uint32)
    rig.trie.insert_all(rows, rows - 1, zeros, rows - rows[0], keys, tokens, 0.0)
    rig.trie.pinned[rows] = True
    longest, task = 0.0, asyncio.create_task(audit(rig.cache))
    begin = time.thread_time()
    while not task.done():
        before = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - before)
    assert (await task).violations == [] and (await task).blocks == len(rows)
    assert longest < max(0.02, (time.thread_time() - begin) / 5)


async def test_the_index_and_the_tries_are_compared(make_rig: MakeRig) -> None:
    rig = await filled(make_rig)
    assert rig.store is not None
    row = rig.rows([1, 2, 3])[2]
    rig.trie.checksums[row, 0] ^= np.uint64(1)
    key = rig.trie.key(row).hex()
    assert (await audit(rig.cache)).violations == [
        f"disk tier: blocks whose slot or checksum in the index differs from memory: {key}"
    ]
    rig.trie.checksums[row, 0] ^= np.uint64(1)
    rig.store.remove([(rig.namespace.id, rig.trie.key(row))])
    assert (await audit(rig.cache)).violations == [f"disk tier: blocks on disk that the index does not name: {key}"]
    rig.cache.mover.disk.damaged.drop(rig.trie, np.array([row]), StorageError("by the test"))
    await rig.cache.mover.quiesce()
    assert await rig.put([9], durable=True) == (1, 0)
    (row,) = rig.rows([9])
    rig.cache.mover.placement.discard_copies(rig.trie, np.array([row]), rig.durable)
    found = (await audit(rig.cache)).violations
    assert found == [f"disk tier: blocks that the index names and the cache has forgotten: {rig.trie.key(row).hex()}"]
    rig.store.remove([(rig.namespace.id, rig.trie.key(row))])


@pytest.mark.slow
async def test_it_is_right_while_the_cache_works(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4, cpu=24, disk=12, write_back=True)
    rig.start_write_back()
    ending = asyncio.Event()

    async def engine(first: int) -> None:
        step = 0
        while not ending.is_set():
            step += 1
            await asyncio.sleep(0)
            prompt = [first + step % 3, step % 5, step % 2]
            with suppress(ExhaustedError):  # write-back holds what it writes
                await rig.put(prompt, durable=step % 2 == 0)
            await rig.get(prompt)
            await rig.cache.prefetch(rig.session, rig.namespace, rig.chain(prompt))
            if step % 4 == 0:
                await forget_blocks(rig.cache.mover, rig.trie, rig.rows(prompt)[::-1])

    engines = [asyncio.create_task(engine(10 * number)) for number in range(2)]
    for _ in range(5):
        assert (await audit(rig.cache)).violations == []
        await asyncio.sleep(0)
    ending.set()
    await asyncio.gather(*engines)
    assert not rig.cache.mover.lost["checksum mismatch on disk"]
