"""Every block on disk is read in time, what is damaged goes, and nobody has to wait for it."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any

import pytest

from prefixd.cache.background.scrubber import Scrubber, ScrubProgress, TokenBucket
from prefixd.cache.index.trie import CPU, DISK
from prefixd_swap import (
    BlockRecord,
    ChecksumError,
    IndexUnavailableError,
    RecordDamagedError,
    StorageError,
)
from tests.rig import MakeRig, Rig
from tests.tries import forget_blocks
from tests.waiting import until


async def verified(rig: Rig, **how: Any) -> ScrubProgress:
    async with aclosing(rig.cache.scrubber.verify(**how)) as steps:
        seen = [progress async for progress in steps]
    return seen[-1]


def unreadable(fd: int, buffer: memoryview, offset: int) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


async def test_everything_is_checked(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=64, disk=64)
    two = rig.register("two", parts=2)
    await rig.put(range(20), durable=True)
    await rig.put([1, 2, 3], namespace=two, durable=True)
    progress = await verified(rig)
    assert (progress.checked_blocks, progress.total_blocks, progress.damaged_blocks) == (23, 23, 0)
    assert progress.checked_bytes == (20 + 3 * 2) * rig.part_bytes
    counters = rig.cache.scrubber.counters
    assert (counters.checked_blocks, counters.damaged_blocks, counters.passes) == (23, 0, 1)


async def test_a_record_without_bytes_counts_neither_as_checked_nor_as_written_nor_as_on_disk(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(cpu=3, disk=16)
    await rig.put([1, 2, 3])
    rig.clock.now += 10
    await rig.put([9])
    assert rig.tiers([1, 2, 3], DISK) == [False, False, True], "the first two have a record for the third's sake"
    progress = await verified(rig)
    assert (progress.checked_blocks, progress.total_blocks, progress.checked_bytes) == (1, 1, rig.part_bytes)
    assert rig.trie.count_copies(slice(0, rig.trie.rows), CPU)[0][DISK] == 1
    writes = rig.cache.mover.disk.writes
    assert (writes.written_blocks, writes.written_bytes) == (1, rig.part_bytes)


async def test_damage_is_found_and_goes_with_what_continues_it(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16, disk=32)
    await rig.put([1, 2, 3, 4], durable=True)
    await rig.put([1, 2, 5], durable=True)
    await rig.put([7, 8], durable=True)
    await rig.restart()
    key = rig.trie.key(rig.rows([1, 2])[1])
    rig.damage(rig.rows([1, 2])[1])
    rig.damage(rig.rows([7, 8])[1])
    progress = await verified(rig)
    assert (progress.damaged_blocks, progress.dropped_blocks) == (2, 5)
    assert (rig.namespace.id, key) in [damage.identity for damage in progress.damaged]
    assert all(isinstance(damage.error, ChecksumError) for damage in progress.damaged)
    assert rig.cache.mover.lost == {"checksum mismatch on disk": 2}
    await rig.check_disk()
    assert [len(rig.rows(p)) for p in ([1, 2, 3, 4], [1, 2, 5], [7, 8])] == [1, 1, 1]
    assert await rig.put([1, 2, 3, 4], durable=True) == (3, 0), "computed again"
    assert (await verified(rig)).damaged_blocks == 0


async def test_a_long_prompt_goes_in_parts_behind_a_damaged_block(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have a turn after each part; until it has gone, a block behind the damaged one is matched by nobody."""
    monkeypatch.setattr("prefixd.cache.disk.damaged_blocks._DROPPED_AT_ONCE", 4)
    rig = make_rig(cpu=32, disk=32)
    prompt = list(range(20))
    await rig.put(prompt, durable=True)
    await rig.put([0, 100], durable=True)
    await rig.restart()
    rig.damage(rig.rows(prompt)[1])
    assert (await verified(rig)).damaged_blocks == 1
    seen = [len(rig.trie)]
    assert len(await rig.cache.match(rig.namespace, rig.chain(prompt))) == 1
    while rig.cache.mover.disk.damaged.busy:
        await asyncio.sleep(0)
        seen.append(len(rig.trie))
    assert len(rig.trie) == 2, "the blocks before the damaged one, and what continues those, stay"
    assert len(set(seen)) > 2
    await rig.check_disk()
    assert await rig.get([0, 100]) == 2
    assert await rig.put(prompt, durable=True) == (19, 0), "computed again"


async def test_a_damaged_leaf_leaves_no_row_behind(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16, disk=32)
    await rig.put([1], durable=True)
    await rig.restart()
    rig.damage(rig.rows([1])[0])
    assert (await verified(rig)).dropped_blocks == 1
    assert len(rig.trie) == 0


async def test_a_block_that_is_in_memory_is_written_again(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16, disk=32, write_back=True)
    rig.start_write_back()
    await rig.put([1, 2, 3], durable=True)
    rows = rig.rows([1, 2, 3])
    rig.damage(rows[0])
    assert (await verified(rig)).dropped_blocks == 1
    await until(lambda: rig.trie.has(rows[0], DISK))
    assert rig.rows([1, 2, 3]) == rows and all(rig.tiers([1, 2, 3], CPU))
    assert (await verified(rig)).damaged_blocks == 0


async def test_a_leased_block_stays_where_it_is_read(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16, disk=32)
    await rig.put([1, 2], durable=True)
    await rig.restart()
    lease = await rig.lease([1, 2])
    assert lease is not None
    rig.damage(rig.rows([1, 2])[0])
    assert (await verified(rig)).dropped_blocks == 1
    rig.check_lease(lease, rig.namespace, rig.chain([1, 2]))
    rig.cache.release(rig.session, lease.id)


async def test_what_is_replaced_while_it_is_read_is_no_damage(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16, disk=32)
    await rig.put([1, 2], durable=True)
    assert rig.store is not None
    really, calls = rig.store.check, []

    def check(namespace: bytes, key: bytes, expected: BlockRecord | None = None) -> bool:
        calls.append(threading.current_thread())
        if len(calls) == 1:
            raise ChecksumError("a write came between")
        return really(namespace, key, expected)

    rig.store.check = check  # type: ignore[method-assign]
    assert (await verified(rig)).damaged_blocks == 0
    assert len(calls) == 3, "the first was read again"
    assert threading.main_thread() not in calls


async def test_what_left_while_it_is_read_is_no_damage(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16, disk=32)
    await rig.put([1, 2], durable=True)
    assert rig.store is not None
    loop, really = asyncio.get_running_loop(), rig.store.check

    async def forget() -> None:
        await forget_blocks(rig.cache.mover, rig.trie, rig.rows([1, 2])[::-1])
        await rig.put([8, 9], durable=True)  # in the same rows

    def check(namespace: bytes, key: bytes, expected: BlockRecord | None = None) -> bool:
        if rig.rows([1, 2]):
            asyncio.run_coroutine_threadsafe(forget(), loop).result()
        return really(namespace, key, expected)

    rig.store.check = check  # type: ignore[method-assign]
    assert (await verified(rig, depth=1)).damaged_blocks == 0
    assert len(rig.rows([8, 9])) == 2


async def test_a_record_that_the_index_has_lost_is_damage(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16, disk=32)
    await rig.put([1, 2], durable=True)
    await rig.restart()
    assert rig.store is not None
    rig.store.remove([(rig.namespace.id, rig.trie.key(rig.rows([1, 2])[1]))])
    progress = await verified(rig)
    assert [str(damage.error) for damage in progress.damaged] == ["the index has lost the block"]
    assert len(rig.rows([1, 2])) == 1


async def test_a_failing_device_ends_it_before_the_cache_is_gone(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=64, disk=64)
    await rig.put(range(40), durable=True)
    await rig.restart()

    rig.ops.pread = unreadable  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="Input/output error"):
        await verified(rig, depth=1)
    assert len(rig.rows(range(40))) == 40 and not rig.cache.mover.lost
    assert rig.cache.scrubber.counters.passes == 0


async def test_a_few_blocks_that_cannot_be_read_go(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16, disk=256)  # 16 slots a slab
    for prompt in range(6):
        await rig.put([prompt], durable=True)
    await rig.restart()
    really = rig.ops.pread

    def read(fd: int, buffer: memoryview, offset: int) -> int:
        return unreadable(fd, buffer, offset) if offset < 2 * rig.part_bytes else really(fd, buffer, offset)

    rig.ops.pread = read  # type: ignore[method-assign]
    progress = await verified(rig)
    assert (progress.damaged_blocks, progress.dropped_blocks) == (2, 2)
    assert rig.cache.mover.lost == {"disk read failed": 2}


def no_index(name: bytes) -> bytes | None:
    raise StorageError("MDB_PANIC while reading the index")


async def test_an_index_that_cannot_be_read_costs_no_block(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=64)
    for prompt in range(10):
        await rig.put([prompt], durable=True)
    assert rig.store is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.store._index, "get", no_index)
        with pytest.raises(IndexUnavailableError, match="no block can be checked while the index cannot be read"):
            await verified(rig)
        row = rig.rows([1])[0]
        with pytest.raises(IndexUnavailableError):
            await rig.cache.mover.disk.reads.recheck(rig.trie, row, int(rig.trie.generation[row]))
        sleep = Sleeper(rig, 1)
        scrubber = Scrubber(rig.cache.mover, rig.clock, bytes_per_s=1 << 30, sleep=sleep)
        scrubber.start()
        await sleep.over.wait()
        assert sleep.slept == [60.0], "the background pauses"
        await scrubber.stop()
    assert len(rig.trie.copies(DISK)) == 10 and not rig.cache.mover.lost
    assert (await verified(rig)).damaged_blocks == 0


async def test_an_index_that_goes_while_a_block_is_looked_at_again_costs_no_block(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=64)
    await rig.put([1], durable=True)
    assert rig.store is not None
    index, really = rig.store._index, rig.ops.pread

    def read(fd: int, buffer: memoryview, offset: int) -> int:
        index.get = no_index  # type: ignore[method-assign]
        return unreadable(fd, buffer, offset)

    rig.ops.pread = read  # type: ignore[method-assign]
    with pytest.raises(IndexUnavailableError):
        await verified(rig)
    rig.ops.pread = really  # type: ignore[method-assign]
    del index.get
    assert len(rig.trie.copies(DISK)) == 1 and not rig.cache.mover.lost
    assert (await verified(rig)).damaged_blocks == 0


async def test_closing_a_verification_ends_its_reads(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=256, disk=256)
    await rig.put(range(200), durable=True)
    gate, reading, really = threading.Event(), threading.Event(), rig.ops.pread

    def read(fd: int, buffer: memoryview, offset: int) -> int:
        reading.set()
        gate.wait()
        return really(fd, buffer, offset)

    rig.ops.pread = read  # type: ignore[method-assign]
    steps = rig.cache.scrubber.verify(depth=1)
    task = asyncio.create_task(anext(steps))
    await until(reading.is_set)
    before = rig.ops.reads
    task.cancel()
    for _ in range(20):  # the loop alone carries it to who reads: the thread is at the gate
        await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.ops.reads - before <= 64, "the piece that had begun was read to its end, and no more"


def test_the_bucket_gives_a_rate_with_a_second_in_store() -> None:
    bucket = TokenBucket(1000, now_s=10.0)
    assert bucket.take(1000, 10.0) == 0
    assert bucket.take(500, 10.0) == pytest.approx(0.5)
    assert bucket.take(500, 10.5) == pytest.approx(0.5)
    assert bucket.take(0, 1000.0) == 0
    assert bucket.take(3000, 1000.0) == pytest.approx(2.0), "idle time is not saved up"


class Sleeper:
    """Lets the time of a rig pass instead of waiting; waits for real after `turns` of it."""

    def __init__(self, rig: Rig, turns: int) -> None:
        self._rig, self._turns = rig, turns
        self.slept: list[float] = []
        self.over = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._rig.clock.now += seconds
        if len(self.slept) >= self._turns:
            self.over.set()
            await asyncio.Event().wait()


async def test_the_background_keeps_to_its_rate_and_its_rhythm(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=200, disk=200)
    await rig.put(range(150), durable=True)
    rig.damage(rig.rows(range(150))[149])
    sleep = Sleeper(rig, 5)
    rate = 50 * 16 << 10  # bytes: blocks as small as these count as 16 KiB
    assert rig.part_bytes < 16 << 10
    scrubber = Scrubber(rig.cache.mover, rig.clock, bytes_per_s=rate, every_s=60.0, sleep=sleep)
    assert scrubber.start() is not None
    await sleep.over.wait()
    # 150 blocks in batches of 64, 50 a second and 50 in store; then it waits for the next pass.
    assert sleep.slept[:4] == pytest.approx([14 / 50, 64 / 50, 22 / 50, 60 - 2.0])
    assert scrubber.counters.passes == 1
    assert (scrubber.counters.checked_blocks, scrubber.counters.damaged_blocks) == (150, 1)
    await scrubber.stop()


async def test_the_background_waits_while_the_disk_is_in_trouble(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16, disk=32)
    await rig.put([1, 2], durable=True)
    rig.durable.readable = False
    sleep = Sleeper(rig, 3)
    scrubber = Scrubber(rig.cache.mover, rig.clock, bytes_per_s=1 << 30, sleep=sleep)
    scrubber.start()
    await sleep.over.wait()
    assert scrubber.counters.checked_blocks == 0
    await scrubber.stop()
    rig.durable.readable = True


async def test_without_a_rate_or_a_disk_there_is_no_background(make_rig: MakeRig) -> None:
    rig, diskless = make_rig(cpu=4, disk=4), make_rig(cpu=4)
    assert Scrubber(rig.cache.mover, rig.clock).start() is None
    assert Scrubber(diskless.cache.mover, diskless.clock, bytes_per_s=1).start() is None


@pytest.mark.parametrize(
    ("at", "put"),
    [
        (4, (0).to_bytes(2, "little")),
        (4, (1).to_bytes(2, "little")),
        (4, (0xFFFF).to_bytes(2, "little")),
        (0, (7).to_bytes(4, "little")),
        (8, bytes(16)),
        (24, (1 << 24).to_bytes(8, "little")),  # the slot of another block
        (40, bytes(8)),
        (72, b"\xff"),
    ],
    ids=["no parts", "a part less", "most parts", "depth", "parent", "slot", "checksum", "token"],
)
async def test_an_altered_record_costs_its_block_and_nothing_else(make_rig: MakeRig, at: int, put: bytes) -> None:
    """The background finds it, drops it and what continues it, and goes on; everything else can be read."""
    rig = make_rig(cpu=64, disk=64)
    two = rig.register("two", parts=2)
    await rig.put([4, 5], namespace=two, durable=True)
    await rig.put([1, 2, 3], namespace=two, durable=True)
    assert rig.store is not None
    trie, row = rig.cache.trie(two), rig.rows([1, 2, 3], two)[1]
    name = two.id + trie.key(row)
    written = rig.store._index.get(name)
    assert written is not None
    rig.store._index.apply([(name, written[:at] + put + written[at + len(put) :])])
    sleep = Sleeper(rig, 1)
    scrubber = Scrubber(rig.cache.mover, rig.clock, bytes_per_s=1 << 30, sleep=sleep)
    task = scrubber.start()
    await sleep.over.wait()
    assert task is not None and not task.done()
    await scrubber.stop()
    assert (scrubber.counters.passes, scrubber.counters.damaged_blocks) == (1, 1)
    assert rig.cache.mover.lost == {"damaged index record": 1}
    await rig.cache.mover.quiesce()
    rig.check()
    assert (await verified(rig)).damaged_blocks == 0
    assert await rig.get([4, 5], namespace=two) == 2
    assert await rig.get([1, 2, 3], namespace=two) == 3, "they are in memory still"
    await rig.restart()
    two = rig.register("two", parts=2)
    assert await rig.get([4, 5], namespace=two) == 2
    assert await rig.get([1, 2, 3], namespace=two) == 1
    assert await rig.put([1, 2, 3], namespace=two, durable=True) == (2, 0)


async def test_an_altered_record_is_found_by_a_verification_and_by_a_commit(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=64, disk=64)
    await rig.put([1, 2], durable=True)
    await rig.put([4, 5], durable=True)
    assert rig.store is not None
    for prompt in ([1, 2], [4, 5]):
        name = rig.namespace.id + rig.trie.key(rig.rows(prompt)[1])
        written = rig.store._index.get(name)
        assert written is not None
        rig.store._index.apply([(name, written[:4] + b"\xff" + written[5:])])
    await forget_blocks(rig.cache.mover, rig.trie, rig.rows([4, 5])[::-1])  # its removal meets the record first
    progress = await verified(rig)
    assert [type(damage.error) for damage in progress.damaged] == [RecordDamagedError]
    assert "record of 56 bytes is damaged (255 parts" in str(progress.damaged[0].error)
    await rig.restart()
    assert await rig.get([1, 2]) == 1 and await rig.get([4, 5]) == 0


async def test_it_needs_no_threads_of_its_own(
    make_rig: MakeRig, no_more_threads: Callable[[], AbstractContextManager[list[str]]]
) -> None:
    rig = make_rig(cpu=16, disk=32)
    await rig.put([1, 2], durable=True)
    with no_more_threads():
        assert (await verified(rig)).checked_blocks == 2
        sleep = Sleeper(rig, 2)
        scrubber = Scrubber(rig.cache.mover, rig.clock, bytes_per_s=1 << 30, every_s=60.0, sleep=sleep)
        task = scrubber.start()
        await sleep.over.wait()
        assert task is not None and not task.done()
        assert scrubber.counters.passes >= 1
        await scrubber.stop()
