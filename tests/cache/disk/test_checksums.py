"""The checksum is of what was committed: bytes that change in memory afterwards are found when they come up."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest
import xxhash

from prefixd.cache import Reservation
from prefixd.cache.disk import checksums
from prefixd.cache.index.trie import CPU, DISK
from tests.rig import MakeRig, Rig


@pytest.fixture(params=["at once", "in threads"], autouse=True)
def inline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is hashed at once; or it is hashed in threads, as much is."""
    if request.param == "in threads":
        monkeypatch.setattr(checksums, "_INLINE_BYTES", 0)


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_INLINE_BYTES", 0)


def alter(rig: Rig, row: int) -> None:
    """Flips a byte of a block in memory."""
    rig.cache.tiers.arena.array(int(rig.trie.slots[row, CPU, 0]), rig.part_bytes)[99] ^= 1


async def test_bytes_altered_in_memory_before_they_were_written_are_never_served_from_disk(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=8)
    await rig.put([1, 2])
    alter(rig, rig.rows([1, 2])[1])
    assert await rig.cache.write_back.flush() == 2
    await rig.restart()
    assert await rig.get([1, 2]) == 1
    assert rig.cache.mover.lost == {"checksum mismatch on disk": 1}


async def test_a_durable_commit_waits_for_its_checksum(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=8)
    await rig.put([1, 2], durable=True)
    rows = rig.rows([1, 2])
    contents = [rig.content(rig.namespace, rig.chain([1, 2]), block) for block in range(2)]
    assert rig.trie.checksums[rows, 0].tolist() == [xxhash.xxh3_64_intdigest(content) for content in contents]
    assert rig.trie.checksummed[rows].all()


async def test_a_block_that_is_hashed_may_be_evicted_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=2, disk=8)
    for prompt in ([1, 2], [3, 4], [5, 6]):  # not by way of `put`, which waits
        reservation = await rig.cache.reserve(rig.session, rig.namespace, rig.chain(prompt))
        assert isinstance(reservation, Reservation) and len(reservation.slots) == 2
        rig.fill(reservation)
        await rig.cache.commit(reservation, 2)
    assert [await rig.get(prompt) for prompt in ([5, 6], [3, 4], [1, 2])] == [2, 2, 2]


async def test_little_is_hashed_when_its_commit_returns(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(cpu=8, disk=8)

    async def commit(prompt: list[int]) -> Any:
        reservation = await rig.cache.reserve(rig.session, rig.namespace, rig.chain(prompt))
        assert isinstance(reservation, Reservation)
        rig.fill(reservation)
        await rig.cache.commit(reservation, len(prompt))
        return rig.trie.checksummed[rig.rows(prompt)]

    for number, (nbytes, parts) in enumerate(((2 * rig.part_bytes, 2), (2 * rig.part_bytes - 1, 2), (1 << 20, 1))):
        monkeypatch.setattr(checksums, "_INLINE_BYTES", nbytes)
        monkeypatch.setattr(checksums, "_INLINE_PARTS", parts)
        at_once = number == 0
        assert (await commit([number, 1])).all() == at_once
        assert bool(rig.cache.mover.checksums.tasks) != at_once
        await rig.cache.mover.checksums.wait_for_all()


async def test_a_block_from_disk_keeps_its_checksum(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=2, disk=8)
    await rig.put([1, 2], durable=True)
    before = rig.trie.checksums[rig.rows([1, 2])].copy()
    await rig.restart()
    assert await rig.get([1, 2]) == 2
    rows = rig.rows([1, 2])
    assert rig.trie.checksummed[rows].all() and (rig.trie.checksums[rows] == before).all()
    rig.damage(rows[1])
    await rig.cache.mover.disk.reads.recheck(rig.trie, rows[1], int(rig.trie.generation[rows[1]]))
    alter(rig, rows[1])
    assert await rig.cache.write_back.flush() == 1, "written again, with the checksum that it came with"
    await rig.restart()
    assert await rig.get([1, 2]) == 1


async def test_gpu_blocks_are_sealed_when_they_come_to_the_cpu_tier(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4, cpu=4, disk=8)
    rows = await rig.put_gpu([1, 2])
    assert not rig.trie.checksummed[rows].any()
    rig.unhold(rows, rig.cache.tiers.compute)
    assert await rig.get([1, 2]) == 2
    await rig.cache.mover.checksums.wait_for_all()
    assert rig.trie.checksummed[rows].all()
    assert await rig.cache.write_back.flush() == 2
    assert rig.tiers([1, 2], DISK) == [True, True]
    await rig.restart()
    assert await rig.get([1, 2]) == 2


async def test_a_second_version_in_memory_is_not_mistaken_for_the_one_on_disk(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=2, disk=8)
    await rig.put([1], durable=True)
    await rig.put([2, 3], durable=True)  # 1 is on disk alone
    care, tiers = rig.cache.mover.disk.health, rig.cache.tiers
    care._set_readable(False)
    reservation = await rig.cache.reserve(rig.session, rig.namespace, rig.chain([1]))
    assert isinstance(reservation, Reservation)
    rig.write(tiers.arena.span(reservation.slots[0][0], rig.part_bytes), bytes(rig.part_bytes))  # other rounding
    await rig.cache.commit(reservation, 1)
    await rig.cache.mover.checksums.wait_for_all()
    care._set_readable(True)
    (row,) = rig.rows([1])
    assert not rig.trie.checksummed[row].any()
    await rig.put([4, 5])  # the version in memory goes
    assert await rig.get([1]) == 1, "the one on disk is verified with its own checksum"


@pytest.mark.usefixtures("in_threads")
async def test_no_object_a_block_waits_for_its_checksum(make_rig: MakeRig) -> None:
    """A garbage collection on the event loop looks at each."""
    rig = make_rig(cpu=200, disk=200)
    prompt = list(range(200))
    await rig.put(prompt)
    mover, rows = rig.cache.mover, np.array(rig.rows(prompt))
    await mover.checksums.wait_for_all()
    rig.trie.checksummed[rows] = False
    gc.collect()
    before = len(gc.get_objects())
    mover.checksums.begin(rig.trie, rows)
    assert len(gc.get_objects()) - before < len(rows) / 2
    await mover.checksums.wait_for_all()
    assert rig.trie.checksummed[rows].all()
    rig.check()


@pytest.mark.usefixtures("in_threads")
async def test_a_block_has_its_checksum_when_all_that_was_begun_for_it_is_done(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=8, disk=8)
    await rig.put([1, 2, 3])
    mover, rows = rig.cache.mover, np.array(rig.rows([1, 2, 3]))
    await mover.checksums.wait_for_all()
    gate, hashed = threading.Event(), mover.checksums._hash_parts

    def slowly(*args: Any) -> list[int]:
        gate.wait(60)
        return hashed(*args)

    rig.trie.checksummed[rows] = False
    with monkeypatch.context() as patch:
        patch.setattr(mover.checksums, "_hash_parts", slowly)
        mover.checksums.begin(rig.trie, rows)
        await asyncio.sleep(0)
    mover.checksums.begin(rig.trie, rows[1:2])
    waiting = asyncio.create_task(mover.checksums.wait(rig.trie, rows[1:2]))
    await asyncio.sleep(0.05)
    assert not waiting.done(), "the first one has not ended"
    gate.set()
    await waiting
    assert not mover.checksums.tasks
    rig.check()
