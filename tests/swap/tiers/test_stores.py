"""What every store tier promises, on the disk and on a simulated store."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prefixd_swap import (
    ChecksumError,
    DiskPart,
    FileOps,
    IndexUnavailableError,
    IntegrityError,
    LostBytesError,
    RecordDamagedError,
    StorageError,
)
from prefixd_swap.errors import TransferDroppedError
from prefixd_swap.tiers import DiskTier, Loads, StoreTier
from prefixd_swap.tiers.disk import REMOVED_AT_ONCE
from prefixd_swap.transfers import Transfers, Urgency
from tests.swap.tiers.simulated import FaultyStoreTier, SimulatedFaults
from tests.swap.tiers.stores import NAMESPACE, PART_BYTES, Blocks, Landing, disk, simulated, unbacked

DEMAND, PREFETCH, WRITE_BACK, SCRUB = Urgency
CAPACITY = 4 << 20


class RefusingOps(FileOps):
    """File calls of which those named in `refused` fail; a read waits for `gate`."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.gate.wait()
        self._check("read")
        return super().pread(fd, buffer, offset)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._check("write")
        return super().pwrite(fd, buffer, offset)

    def _check(self, operation: str) -> None:
        if operation in self.refused:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


class Bench:
    """One store tier with its own transfers, and a way to let it fail."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.transfers = Transfers()
        self.ops = RefusingOps()
        self.faults = SimulatedFaults()
        self.tier: StoreTier
        if kind == "disk":
            self.tier = disk(folder, self.transfers, CAPACITY, self.ops)
        elif kind == "unbacked":
            self.tier = unbacked(self.transfers, CAPACITY, self.faults)
        else:
            self.tier = simulated(self.transfers, CAPACITY, self.faults)

    def refuse(self, *operations: str) -> None:
        self.ops.refused = set(operations)
        self.faults.down = set(operations)  # type: ignore[arg-type]

    def holds(self, landing: Landing, blocks: Blocks, at: int) -> bool:
        """Whether a block landed; a store without bytes leaves what was there."""
        return landing.holds(blocks, at) if self.tier.backed else not any(part.any() for part in landing.data[at])

    async def close(self) -> None:
        self.tier.check_integrity()
        await self.transfers.close()
        self.tier.close()
        if isinstance(self.tier, DiskTier):
            self.tier.store.close()


@pytest.fixture(params=["disk", "simulated", "unbacked"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(request.param, tmp_path / "store")
    yield made
    await made.close()


async def test_what_was_written_is_read(bench: Bench) -> None:
    blocks = Blocks(150)
    places = await bench.tier.write(blocks.new, WRITE_BACK)
    assert all(isinstance(place, tuple) and len(place) == 2 for place in places)
    landing = Landing(places)
    assert await bench.tier.read(landing.loads, DEMAND) == [None] * 150
    assert all(bench.holds(landing, blocks, at) for at in range(150))
    assert await bench.tier.verify(blocks.records(places), sum(PART_BYTES)) == [None] * 150
    assert 0 < bench.tier.used_bytes <= bench.tier.capacity_bytes == CAPACITY
    records = bench.tier.load()
    assert sorted(map(bytes, records.keys)) == sorted(blocks.keys)


async def test_a_block_may_lack_a_part(bench: Bench) -> None:
    blocks = Blocks(3, lacking=[1])
    places = await bench.tier.write(blocks.new, DEMAND)
    assert isinstance(places[1], tuple) and places[1][1] is None
    landing = Landing(places)
    assert await bench.tier.read(landing.loads, DEMAND) == [None] * 3
    assert bench.holds(landing, blocks, 0) and bench.holds(landing, blocks, 2)
    if bench.tier.backed:
        assert np.array_equal(landing.data[1][0], blocks.data[1][0])
    assert not landing.data[1][1].any()


async def test_what_has_no_room_is_not_stored_and_the_rest_is(bench: Bench) -> None:
    blocks = Blocks(700)
    before = bench.tier.room(4096)
    places = await bench.tier.write(blocks.new, DEMAND)
    stored = [place for place in places if place is not None]
    assert 0 < len(stored) < 700 and before == CAPACITY // 4096
    assert places[: len(stored)] == stored, "no later block takes the room that an earlier one lacked"
    assert await bench.tier.write(blocks.new[-1:], DEMAND) == [None]
    await bench.tier.remove(blocks.names[: len(stored)][::-1], DEMAND)
    assert bench.tier.used_bytes == 0 and len(bench.tier.load()) == 0


async def test_removed_blocks_are_gone_and_unknown_ones_are_ignored(bench: Bench) -> None:
    blocks = Blocks(5)
    places = await bench.tier.write(blocks.new, DEMAND)
    await bench.tier.remove([*blocks.names[:2:-1], (NAMESPACE, bytes(16))], WRITE_BACK)
    found = await bench.tier.verify(blocks.records(places), sum(PART_BYTES))
    assert [type(error) for error in found] == [type(None)] * 3 + [LostBytesError] * 2
    await bench.tier.remove([], DEMAND)


async def test_a_record_that_says_something_else_is_damage(bench: Bench) -> None:
    blocks = Blocks(3)
    records = blocks.records(await bench.tier.write(blocks.new, DEMAND))
    records[1] = replace(records[1], tokens=bytes(range(8)))
    found = await bench.tier.verify(records, sum(PART_BYTES))
    assert [type(error) for error in found] == [type(None), RecordDamagedError, type(None)]
    await bench.tier.remove(blocks.names[:0:-1], DEMAND, damaged=True)
    assert len(bench.tier.load()) == 1
    known = [part.slot for record in records[:1] for part in record.parts if part is not None]
    await bench.tier.revive(np.array(known))  # slots of damaged records are free only now


async def test_an_audit_lists_every_record(bench: Bench) -> None:
    blocks = Blocks(4)
    await bench.tier.write(blocks.new, DEMAND)
    await bench.tier.remove(blocks.names[:1], DEMAND)
    audited = await bench.tier.audit()
    assert audited is not None and len(audited) == 3, "the children of a removed block are listed"
    assert len(bench.tier.load()) == 0
    await bench.tier.try_write()


async def test_a_block_that_is_written_again_is_replaced(bench: Bench) -> None:
    first, second = Blocks(2, seed=1), Blocks(2, seed=1)
    second.data[0][0][:] = 7
    await bench.tier.write(first.new, DEMAND)
    used = bench.tier.used_bytes
    landing = Landing(await bench.tier.write(second.new, DEMAND))
    assert await bench.tier.read(landing.loads, DEMAND) == [None, None]
    assert bench.holds(landing, second, 0) and bench.tier.used_bytes == used


async def test_a_wrong_checksum_costs_one_block(bench: Bench) -> None:
    if not bench.tier.backed:
        pytest.skip("without bytes there are no checksums")
    blocks = Blocks(10)
    landing = Landing(await bench.tier.write(blocks.new, DEMAND))
    landing.loads.checksums[4, 1] += np.uint64(1)
    results = await bench.tier.read(landing.loads, DEMAND)
    assert isinstance(results[4], ChecksumError)
    assert [result for at, result in enumerate(results) if at != 4] == [None] * 9


async def test_a_device_that_fails_to_read_is_an_error_a_block(bench: Bench) -> None:
    blocks = Blocks(3)
    places = await bench.tier.write(blocks.new, DEMAND)
    landing = Landing(places)
    bench.refuse("read")
    assert [type(error) for error in await bench.tier.read(landing.loads, DEMAND)] == [StorageError] * 3
    assert [type(error) for error in await bench.tier.verify(blocks.records(places), 1)] == [StorageError] * 3
    with pytest.raises(StorageError):
        await bench.tier.try_read()
    bench.refuse()
    await bench.tier.try_read()
    assert await bench.tier.read(landing.loads, DEMAND) == [None] * 3


async def test_a_write_that_fails_stores_nothing_of_its_piece_nor_after_it(bench: Bench) -> None:
    blocks = Blocks(200)
    assert len(blocks.new) > 64, "more than a piece"
    writing = bench.tier.submit_write(_refuse_later(bench, blocks, 64), WRITE_BACK, count=200, nbytes=sum(PART_BYTES))
    results = await writing.finish()
    assert [isinstance(result, tuple) for result in results] == [True] * 64 + [False] * 136
    assert all(isinstance(result, StorageError) for result in results[64:])
    bench.refuse()
    assert len(bench.tier.load()) == 64
    known = np.array([part.slot for place in results[:64] if isinstance(place, tuple) for part in place if part])
    assert len(await bench.tier.revive(known)) == 0
    assert [type(result) for result in await bench.tier.write(blocks.new[64:], DEMAND)] == [tuple] * 136


def _refuse_later(bench: Bench, blocks: Blocks, after: int):  # type: ignore[no-untyped-def]
    for at, block in enumerate(blocks.new):
        if at == after:
            bench.refuse("write")
        yield block


def _slot(place: object) -> int:
    assert isinstance(place, tuple) and isinstance(place[0], DiskPart)
    return place[0].slot


async def test_reviving_forgets_what_the_caller_does_not_know(bench: Bench) -> None:
    blocks = Blocks(4)
    places = await bench.tier.write(blocks.new, DEMAND)
    known = np.array([part.slot for place in places[:3] if isinstance(place, tuple) for part in place if part])
    lost = await bench.tier.revive(np.append(known, 1 << 40))
    assert lost.tolist() == [1 << 40]
    assert len(bench.tier.load()) == 3
    bench.refuse("write")
    if isinstance(bench.tier, FaultyStoreTier):
        with pytest.raises(StorageError):
            await bench.tier.revive(known)
    bench.refuse()


async def test_namespaces_are_kept(bench: Bench) -> None:
    assert bench.tier.namespaces() == {}
    await bench.tier.put_namespace(NAMESPACE, b"what it is")
    assert bench.tier.namespaces() == {NAMESPACE: b"what it is"}


async def test_nothing_is_lost_or_shrunk_without_cause(bench: Bench) -> None:
    places = await bench.tier.write(Blocks(3).new, DEMAND)
    assert len(await bench.tier.lost_slots()) == 0 and not await bench.tier.has_shrunk()
    if isinstance(bench.tier, FaultyStoreTier):
        bench.tier.lose([_slot(places[1])])
        assert (await bench.tier.lost_slots()).tolist() == [_slot(places[1])]
        landing = Landing(places)
        assert isinstance((await bench.tier.read(landing.loads, DEMAND))[1], LostBytesError)


async def test_results_come_piece_by_piece(bench: Bench) -> None:
    blocks = Blocks(200)
    landing = Landing(await bench.tier.write(blocks.new, DEMAND))
    reading = bench.tier.submit_read(landing.loads, PREFETCH)
    reading.raise_to(DEMAND)
    came: dict[int, None] = {}
    async for first, results in reading.arrived():
        assert results == [None] * len(results)
        for at in range(first, first + len(results)):
            assert at not in came and bench.holds(landing, blocks, at)
            came[at] = None
    assert len(came) == 200 and await reading.finish() == [None] * 200


async def test_submitting_many_blocks_does_not_hold_the_event_loop(tmp_path: Path) -> None:
    bench = Bench("disk", tmp_path / "store")
    bench.ops.gate.clear()
    count = 62_500
    loads = Loads(
        np.zeros((count, 2), np.int64), np.zeros((count, 2), np.uint64), np.zeros((count, 2), np.int64), PART_BYTES
    )
    gc.collect()  # none is due in what is measured
    began_s = time.thread_time()
    reading = bench.tier.submit_read(loads, PREFETCH)
    writing = bench.tier.submit_write(iter(()), WRITE_BACK, count=count, nbytes=1)
    assert time.thread_time() - began_s < 0.01
    assert bench.transfers.stats()[0].by_urgency[PREFETCH].waiting_bytes > 500 << 20
    reading.transfer.drop()
    writing.transfer.drop()
    bench.ops.gate.set()
    assert len(await reading.finish()) == count
    await bench.close()


async def test_many_removals_are_several_transactions(bench: Bench) -> None:
    names = [(NAMESPACE, at.to_bytes(16, "big")) for at in range(REMOVED_AT_ONCE + 1)]
    await bench.tier.remove(names, WRITE_BACK)
    if isinstance(bench.tier, DiskTier):
        assert bench.tier.store.commits == 2


async def test_cancelled_reads_end_before_their_memory_goes(tmp_path: Path) -> None:
    bench = Bench("disk", tmp_path / "store")
    blocks = Blocks(200)
    landing = Landing(await bench.tier.write(blocks.new, DEMAND))
    bench.ops.gate.clear()
    reading = asyncio.create_task(bench.tier.read(landing.loads, PREFETCH))
    await asyncio.sleep(0)
    other = bench.tier.submit_read(landing.loads, SCRUB)
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.sleep(0.01)
    assert not reading.done()
    cancelling = asyncio.create_task(other.cancel())
    bench.ops.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    results = await cancelling
    assert len(results) == 200 and isinstance(results[-1], TransferDroppedError)
    await bench.close()


async def test_an_index_that_cannot_be_read_blames_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("disk", tmp_path / "store")
    assert isinstance(bench.tier, DiskTier)
    blocks = Blocks(3)
    places = await bench.tier.write(blocks.new, DEMAND)

    def broken(namespace: bytes, key: bytes, expected: object) -> bool:
        raise IndexUnavailableError("the index is closed")

    with monkeypatch.context() as patch:
        patch.setattr(bench.tier.store, "check", broken)
        found = await bench.tier.verify(blocks.records(places), sum(PART_BYTES))
    assert [type(error) for error in found] == [IndexUnavailableError] * 3
    await bench.close()


async def test_an_error_that_is_no_storage_error_is_raised(bench: Bench) -> None:
    blocks = Blocks(1)

    def broken():  # type: ignore[no-untyped-def]
        raise LookupError("the block has gone meanwhile")
        yield blocks.new[0]

    with pytest.raises(LookupError):
        await bench.tier.submit_write(broken(), DEMAND, count=1, nbytes=1).finish()


async def test_simulated_faults_come_by_seed() -> None:
    def run(seed: int) -> list[bool]:
        import random

        faults = SimulatedFaults({"read": 0.3, "wrong bytes": 0.2}, random.Random(seed))

        async def go() -> list[bool]:
            tier = simulated(Transfers(), CAPACITY, faults)
            landing = Landing(await tier.write(Blocks(60).new, DEMAND))
            return [error is None for error in await tier.read(landing.loads, DEMAND)]

        return asyncio.run(go())

    first, second, third = await asyncio.gather(*(asyncio.to_thread(run, seed) for seed in (1, 1, 2)))
    assert first == second != third
    assert 10 < sum(first) < 50


async def test_a_simulated_store_that_does_not_add_up_says_so() -> None:
    tier = simulated(Transfers(), CAPACITY)
    await tier.write(Blocks(2).new, DEMAND)
    tier.check_integrity()
    tier._used_bytes += 1
    with pytest.raises(IntegrityError, match="counted"):
        tier.check_integrity()
    tier._used_bytes -= 1
    tier._bytes[99] = b""
    with pytest.raises(IntegrityError, match="named"):
        tier.check_integrity()
