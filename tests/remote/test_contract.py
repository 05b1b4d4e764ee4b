"""What every store promises, over a real server of each kind."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from prefixd_swap.errors import RemoteStoreError
from prefixd_swap.stores import ObjectStore, Read, StoreOptions, Write, open_store
from tests.remote.objects import DEADLINE_S, LATE_S, assert_read, found, joined, new_name, new_write, read_of

SIZES = [(0,), (1,), (64, 0, 5), (15, 1 << 14), (64, (1 << 16) - 3), (100, 200_000, 7), (64, 3 << 20), (5 << 20,)]


async def test_objects_of_all_sizes_come_back(store: ObjectStore) -> None:
    writes = [new_write(*sizes) for sizes in SIZES]
    await store.put(writes, 0, DEADLINE_S)
    assert await store.exists([write.name for write in writes], DEADLINE_S) == [True] * len(writes)
    reads = [read_of(write) for write in writes]
    assert await found(store, reads) == [True] * len(reads)
    assert_read(reads, writes)


async def test_pieces_may_be_cut_elsewhere(store: ObjectStore) -> None:
    write = new_write(100, 5000, 3)
    await store.put([write], 0, DEADLINE_S)
    read = read_of(write, 1, 102, 5000)
    assert await found(store, [read]) == [True]
    assert_read([read], [write])


async def test_of_a_batch_some_are_there(store: ObjectStore) -> None:
    there, absent = [new_write(10, 5000) for _ in range(5)], [new_write(10, 5000) for _ in range(5)]
    await store.put(there, 0, DEADLINE_S)
    mixed = [write for pair in zip(there, absent, strict=True) for write in pair]
    assert await store.exists([write.name for write in mixed], DEADLINE_S) == [True, False] * 5
    reads = [read_of(write) for write in mixed]
    assert await found(store, reads) == [True, False] * 5
    assert_read(reads[::2], there)


async def test_an_object_may_be_shorter_than_its_memory_and_not_longer(store: ObjectStore) -> None:
    lengths = [
        (64, 99_999),
        (64, 100_000),
        (64, 100_001),
        (64, 300_000),
        (100_064, 7),
        (50_000, 9, 90_000, 80_000),
        (0,),
    ]
    writes = [new_write(64, 100_000) for _ in lengths]
    await store.put(writes, 0, DEADLINE_S)
    reads = [read_of(write, *length) for write, length in zip(writes, lengths, strict=True)]
    assert await store.get(reads, DEADLINE_S) == [None, *[100_064] * 5, None]
    for read, write in zip(reads[1:-1], writes[1:-1], strict=True):
        assert joined(read)[:100_064] == joined(write)


async def test_short_objects_among_others_leave_them_alone(store: ObjectStore) -> None:
    """Lengths around those at which a store reads, joins or skips differently."""
    sizes = [1, 103, 104, 105, 4095, 16 << 10, (16 << 10) + 1, 300_000, 2 << 20, 5 << 20]
    writes = [new_write(size) for size in sizes]
    await store.put(writes, 0, DEADLINE_S)
    lengths = [(104, size + more) for size, more in zip(sizes, (0, 1, 9, 4096, 70_000) * 2, strict=True)]
    reads = [read_of(write, *length) for write, length in zip(writes, lengths, strict=True)]
    others = [read_of(write) for write in writes]
    mixed = [read for pair in zip(reads, others, strict=True) for read in pair]
    assert await store.get(mixed, DEADLINE_S) == [size for size in sizes for _ in range(2)]
    assert [joined(read)[:size] for read, size in zip(reads, sizes, strict=True)] == [joined(write) for write in writes]
    assert_read(others, writes)


async def test_one_name_several_times(store: ObjectStore) -> None:
    write = new_write(64, 70_000)
    await store.put([write], 0, DEADLINE_S)
    await store.put([write], 0, DEADLINE_S)
    reads = [read_of(write) for _ in range(3)]
    assert await found(store, reads) == [True] * 3
    assert_read(reads, [write] * 3)
    assert await store.exists([write.name] * 2, DEADLINE_S) == [True] * 2


async def test_empty_batches(store: ObjectStore) -> None:
    assert await store.exists([], DEADLINE_S) == []
    assert await store.get([], DEADLINE_S) == []
    await store.put([], 0, DEADLINE_S)
    await store.delete([], DEADLINE_S)


async def test_deleted_objects_are_gone(store: ObjectStore) -> None:
    writes = [new_write(3000) for _ in range(4)]
    await store.put(writes, 0, DEADLINE_S)
    await store.delete([writes[0].name, writes[2].name, new_name()], DEADLINE_S)
    assert await store.exists([write.name for write in writes], DEADLINE_S) == [False, True, False, True]
    assert await found(store, [read_of(write) for write in writes]) == [False, True, False, True]


async def test_a_big_batch(store: ObjectStore) -> None:
    writes = [new_write(8, 2000) for _ in range(1500)]
    await store.put(writes, 0, DEADLINE_S)
    names = [name for write in writes for name in (write.name, new_name())]
    assert await store.exists(names, DEADLINE_S) == [True, False] * 1500
    reads = [read_of(write) for write in writes]
    assert await found(store, reads) == [True] * 1500
    assert_read(reads, writes)


async def test_batches_side_by_side(store: ObjectStore) -> None:
    batches = [[new_write(64, 300_000) for _ in range(6)] for _ in range(6)]
    await asyncio.gather(*(store.put(batch, 0, DEADLINE_S) for batch in batches))

    async def read(batch: list[Write]) -> None:
        reads = [read_of(write) for write in batch]
        assert await found(store, reads) == [True] * len(batch)
        assert_read(reads, batch)

    await asyncio.gather(*(read(batch) for batch in batches))


async def test_a_deadline_that_has_passed(store: ObjectStore) -> None:
    write = new_write(100)
    for deadline_s in (0.0, -1.0, math.nan):
        with pytest.raises(RemoteStoreError, match="has not ended"):
            await store.get([read_of(write)], deadline_s)
        with pytest.raises(RemoteStoreError, match="has not ended"):
            await store.put([write], 0, deadline_s)


async def test_a_short_deadline_leaves_nothing_wrong_behind(store: ObjectStore) -> None:
    """Calls that are cut off anywhere; the next calls get their own answers."""
    writes = [new_write(64, 1 << 20) for _ in range(8)]
    await store.put(writes, 0, DEADLINE_S)
    for tenth_ms in range(1, 30, 2):
        began_s = time.monotonic()
        try:
            await store.get([read_of(write) for write in writes], tenth_ms * 1e-4)
        except RemoteStoreError as error:
            assert store.address in str(error)
        assert time.monotonic() - began_s < LATE_S
        one = writes[tenth_ms % 8]
        read = read_of(one)
        assert await found(store, [read]) == [True]
        assert_read([read], [one])


async def test_a_cancelled_get_writes_nothing_any_more(store: ObjectStore) -> None:
    writes = [new_write(64, 1 << 20) for _ in range(8)]
    await store.put(writes, 0, DEADLINE_S)
    for wait_s in (0.0, 0.0005, 0.001, 0.002, 0.004):
        reads = [read_of(write) for write in writes]
        task = asyncio.ensure_future(store.get(reads, DEADLINE_S))
        await asyncio.sleep(wait_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        before = [joined(read) for read in reads]
        await asyncio.sleep(0.02)
        assert [joined(read) for read in reads] == before


async def test_ping_and_close(options: StoreOptions) -> None:
    store = open_store(options)
    await store.ping(DEADLINE_S)
    await store.close()
    await store.close()
    with pytest.raises(RemoteStoreError, match="closed"):
        await store.exists([new_name()], DEADLINE_S)


async def test_close_before_the_first_call(options: StoreOptions) -> None:
    await open_store(options).close()


async def test_close_ends_calls(options: StoreOptions) -> None:
    store = open_store(options)
    writes = [new_write(4 << 20) for _ in range(4)]
    call = asyncio.ensure_future(store.put(writes, 0, DEADLINE_S))
    await asyncio.sleep(0.001)
    await store.close()
    (outcome,) = await asyncio.wait_for(asyncio.gather(call, return_exceptions=True), DEADLINE_S)
    assert outcome is None or isinstance(outcome, RemoteStoreError)


async def test_copies_are_counted(store: ObjectStore) -> None:
    write = new_write(64, 4 << 20)
    await store.put([write], 0, DEADLINE_S)
    put = store.copied_bytes
    read: Read = read_of(write)
    assert await found(store, [read]) == [True]
    assert 0 <= put <= write.nbytes
    assert 0 <= store.copied_bytes - put <= write.nbytes
