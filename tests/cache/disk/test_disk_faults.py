"""Flipped bits, lost files, a full file system: counted, reported, and never served."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.checks.fault_injection.faulty_daemon import FAULTS, FaultyOps
from prefixd.base.errors import ExhaustedError
from prefixd.cache.index.trie import CPU, DISK
from prefixd_swap import StorageError
from prefixd_swap.slab.files.io import DiskIo
from prefixd_swap.slab.files.slab_file import INDEX_BITS
from prefixd_swap.slots import PAGE_BYTES
from tests.rig import MakeRig
from tests.tries import forget_blocks
from tests.waiting import until


class Faults:
    """A cache on a disk that fails on command, as `benchmarks.checks.fault_injection.faulty_daemon` has it."""

    def __init__(self, make_rig: MakeRig, path: Path, **how: Any) -> None:
        self._orders = path / "orders"
        self.rig = make_rig(ops=FaultyOps(self._orders), **how)
        self.health = self.rig.cache.mover.disk.health

    def order(self, name: str | None) -> None:
        self.obey(FAULTS[name] if name else {})

    def obey(self, orders: Mapping[str, str | int]) -> None:
        fresh = self._orders.with_suffix(".new")
        fresh.write_text(json.dumps(dict(orders)))
        fresh.rename(self._orders)


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("io", ["mmap", "direct", "buffered"])
async def test_a_damaged_block_goes_with_its_descendants(make_rig: MakeRig, io: DiskIo) -> None:
    rig = make_rig(cpu=8, disk=16, io=io)
    await rig.put([1, 2, 3, 4], durable=True)
    await rig.put([1, 2, 5], durable=True)
    await rig.put([1, 9], durable=True)
    await rig.restart()
    rig.damage(rig.rows([1, 2])[1])
    assert await rig.get([1, 2]) == 1
    await rig.check_disk()
    assert rig.cache.mover.lost == {"checksum mismatch on disk": 1}
    assert [len(rig.rows(p)) for p in ([1, 2, 3, 4], [1, 2, 5], [1, 9])] == [1, 1, 2]
    assert len(rig.trie) == 2
    assert await rig.put([1, 2, 3, 4], durable=True) == (3, 0), "computed again"
    await rig.restart()
    assert await rig.get([1, 2, 3, 4]) == 4


async def test_what_follows_a_damaged_block_comes_back_with_it(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=16)
    await rig.put([1, 2, 3, 4], durable=True)
    await rig.restart()
    rig.damage(rig.rows([1, 2, 3, 4])[1])
    assert await rig.get([1, 2, 3, 4]) == 1, "the lease ends before the damage, though 3 and 4 were read"
    assert await rig.put([1, 2, 3, 4]) == (1, 2)
    assert await rig.get([1, 2, 3, 4]) == 4


@pytest.mark.parametrize("damaged", [0, 1, 2])
async def test_a_damaged_block_that_goes_while_room_is_made_for_it_is_not_served(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, damaged: int
) -> None:
    """The scrubber finds it while a request waits for room: of its slot in memory nobody has written a byte."""
    rig = make_rig(cpu=8, disk=16)
    await rig.put([1, 2, 3], durable=True)
    await rig.restart()
    row = rig.rows([1, 2, 3])[damaged]
    rig.damage(row)
    mover, trie = rig.cache.mover, rig.trie
    original = mover.slots.allocate

    async def allocate(*arguments: Any, **how: Any) -> Any:
        await mover.disk.reads.recheck(trie, row, int(trie.generation[row]))
        return await original(*arguments, **how)

    monkeypatch.setattr(mover.slots, "allocate", allocate)
    assert await rig.get([1, 2, 3]) == damaged
    monkeypatch.undo()
    assert rig.cache.mover.lost == {"checksum mismatch on disk": 1}
    rig.check()
    assert (await rig.put([1, 2, 3]))[0] >= 1
    assert await rig.get([1, 2, 3]) == 3


async def test_a_copy_above_outlives_the_damage(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4, cpu=4, disk=8)
    await rig.put([1, 2], durable=True)
    rows = rig.rows([1, 2])
    rig.damage(rows[0])
    assert await rig.get([1, 2]) == 2
    assert not rig.cache.mover.lost, "nobody had to read it"


async def test_blocks_in_memory_survive_a_damaged_ancestor_while_leased(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=8)
    await rig.put([1, 2, 3, 4], durable=True)
    await rig.restart()
    lease = await rig.lease([1, 2, 3], first_block=2)
    rig.damage(rig.rows([1])[0])
    assert await rig.get([1, 2, 3]) == 0
    assert lease is not None
    rig.check_lease(lease, rig.namespace, rig.chain([1, 2, 3]), first_block=2)
    rig.check()
    rig.cache.release(rig.session, lease.id)
    assert await rig.put([1, 2, 3, 4]) == (4, 0) or len(rig.rows([1, 2, 3])) == 3
    assert await rig.get([1, 2, 3]) == 3


async def test_blocks_that_are_lost_together_go_once(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16, disk=64)
    await rig.put([1, 2, 3, 4], durable=True)
    await rig.put([1, 5], durable=True)
    rows, other = rig.rows([1, 2, 3, 4]), rig.rows([1, 5])
    held = await rig.lease([1, 5])
    assert held is not None
    rig.cache.placement.drop(rig.trie, rows[:1:-1], rig.cache.tiers.shared)
    rig.cache.placement.drop(rig.trie, rows[1:2], rig.cache.tiers.shared)
    lost = np.array([rows[1], rows[2], other[1]])
    assert rig.cache.mover.disk.damaged.drop(rig.trie, lost, StorageError("by the test")) == 4
    assert rig.rows([1, 2, 3, 4]) == rows[:1], "with what continued them"
    assert rig.tiers([1, 5], CPU) == [True, True]
    assert rig.tiers([1, 5], DISK) == [True, False], "in memory, to be written again"
    assert sum(rig.cache.mover.lost.values()) == 3
    rig.cache.release(rig.session, held.id)
    await rig.check_disk()


@pytest.mark.parametrize("io", ["mmap", "direct", "buffered"])
async def test_a_deleted_slab_is_a_loss_and_no_more(make_rig: MakeRig, io: DiskIo) -> None:
    rig = make_rig(cpu=8, disk=8, io=io)
    await rig.put([1, 2], durable=True)
    await rig.restart()
    for slab in rig.path.rglob("*.slab"):
        os.truncate(slab, 0)
    assert await rig.get([1, 2]) == 0
    assert sum(rig.cache.mover.lost.values()) > 0
    await rig.check_disk()
    assert len(rig.trie) == 0
    assert await rig.put([1, 2]) == (2, 0)
    assert await rig.get([1, 2]) == 2


async def test_a_full_file_system_is_reported_and_the_rest_goes_on(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=64)
    rig.ops.fail = full()
    with pytest.raises(ExhaustedError, match=r"2 blocks .* are cached, but 2 .* has no room for them: No space"):
        await rig.put([1, 2], durable=True)
    assert "No space left" in rig.cache.tiers.troubles.what("disk tier")
    assert rig.cache.mover.lost["not written: no room on disk"] == 2
    for prompt in range(10, 20):
        assert await rig.put([prompt, 7]) == (2, 0)
        assert await rig.get([prompt, 7]) == 2
    rig.ops.fail = None
    assert rig.store is not None
    rig.store._slabs._space.freed()  # as if somebody had freed space
    await rig.put([1, 2], durable=True)
    assert not rig.cache.tiers.troubles.what("disk tier")
    await rig.restart()
    assert await rig.get([1, 2]) == 2


async def test_the_trouble_stays_until_something_is_written(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=64)
    rig.ops.fail = full()
    await rig.put([1, 2])
    for _ in range(2):  # the second time, the store knows and just has no room
        assert await rig.cache.write_back.flush() == 0
        assert "No space left" in rig.cache.tiers.troubles.what("disk tier")


async def test_a_failing_device_costs_no_block_that_is_on_it(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=8)
    await rig.put([1, 2], durable=True)
    await rig.put([5, 6])
    rig.ops.fail = broken()
    assert await rig.cache.write_back.flush() == 0
    assert "Input/output error" in rig.cache.tiers.troubles.what("disk tier")
    assert rig.tiers([1, 2], DISK) == [True, True]
    rig.ops.fail = None
    assert await rig.cache.write_back.flush() == 2


async def test_a_removal_that_fails_is_said_and_its_block_comes_back(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=4, disk=4)
    await rig.put([1, 2], durable=True)
    assert rig.store is not None

    def refuse(ids: object, *, damaged: bool = False) -> None:
        raise StorageError("the index cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "remove", refuse)
        with pytest.raises(StorageError, match="index cannot be written"):
            await forget_blocks(rig.cache.mover, rig.trie, rig.rows([1, 2])[::-1])
    rig.check()
    assert rig.rows([1, 2]) == []
    await rig.restart()
    assert await rig.get([1, 2]) == 2


async def test_an_eviction_that_fails_on_disk_fails_no_caller(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=2, disk=2)
    await rig.put([1, 2], durable=True)
    await rig.put([3, 4])
    assert rig.store is not None

    def refuse(ids: object, *, damaged: bool = False) -> None:
        raise StorageError("the index cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "remove", refuse)
        assert await rig.put([5, 6]) == (2, 0)
    assert "index cannot be written" in rig.cache.tiers.troubles.what("disk tier")
    assert await rig.get([5, 6]) == 2
    await rig.restart()


REFUSES_WRITES = [
    "disk full",
    "no room for the index",
    "write error",
    "sync error",
    "index error",
    "index error half-way",
    "index error afterwards",
    "read-only file system",
]


@pytest.mark.parametrize("name", REFUSES_WRITES)
async def test_a_disk_that_refuses_writes_is_out_and_comes_back(make_rig: MakeRig, tmp_path: Path, name: str) -> None:
    faults = Faults(make_rig, tmp_path, cpu=4, disk=8)
    rig, tiers = faults.rig, faults.rig.cache.tiers
    await rig.put([1, 2], durable=True)
    faults.order(name)
    with pytest.raises(ExhaustedError, match="blocks of the prompt are cached"):
        await rig.put([3, 4], durable=True)
    assert not tiers.writes and tiers.troubles.what("disk tier")
    assert not await faults.health.revive()
    assert await rig.get([3, 4]) == 2, "from memory"
    for prompt in range(10, 16):  # more than memory holds: what is not on disk gives way
        assert await rig.put([prompt]) == (1, 0)
        assert await rig.get([prompt]) == 1
    assert await rig.get([1, 2]) == 2, "reads go on"
    assert sum(blocks for why, blocks in rig.cache.mover.lost.items() if "disk out of service" in why) >= 4
    rig.check()

    faults.order(None)
    assert await faults.health.revive()
    assert tiers.writes and not tiers.troubles.what("disk tier")
    await rig.check_disk()
    assert await rig.put([5, 6], durable=True) == (2, 0)
    assert await rig.get([1, 2]) == 2
    await rig.restart()
    assert await rig.get([1, 2]) == 2
    assert await rig.get([5, 6]) == 2


async def test_it_comes_back_by_itself_with_nothing_to_write(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd.cache.disk.health.FIRST_PROBE_S", 0.01)
    faults = Faults(make_rig, tmp_path, cpu=4, disk=8)
    faults.rig.cache.mover.start_probing()
    faults.order("index error half-way")
    with pytest.raises(ExhaustedError):
        await faults.rig.put([1, 2], durable=True)
    faults.order(None)
    await until(lambda: not faults.rig.cache.tiers.troubles.what("disk tier"))


async def test_what_a_half_written_commit_left_is_cleared_up(make_rig: MakeRig, tmp_path: Path) -> None:
    faults = Faults(make_rig, tmp_path, cpu=4, disk=4)
    rig = faults.rig
    assert rig.store is not None
    await rig.put([1], durable=True)
    faults.order("index error afterwards")  # on disk, but nobody was told
    with pytest.raises(ExhaustedError):
        await rig.put([2, 3], durable=True)
    faults.order(None)
    assert await faults.health.revive()
    await rig.check_disk()
    assert rig.store.used_bytes == rig.part_bytes
    assert await rig.cache.write_back.flush() == 2
    await rig.put([4], durable=True)
    assert rig.store.used_bytes == 4 * rig.part_bytes, "no slot was lost"
    await rig.restart()
    assert [await rig.get(prompt) for prompt in ([1], [2, 3], [4])] == [1, 2, 1]


async def test_a_removal_that_failed_is_made_good_when_the_disk_is_back(make_rig: MakeRig, tmp_path: Path) -> None:
    faults = Faults(make_rig, tmp_path, cpu=4, disk=4)
    rig = faults.rig
    await rig.put([1, 2], durable=True)
    faults.order("index error")
    with pytest.raises(StorageError):
        await forget_blocks(rig.cache.mover, rig.trie, rig.rows([1, 2])[::-1])
    faults.order(None)
    assert await faults.health.revive()
    await rig.check_disk()
    await rig.restart()
    assert rig.rows([1, 2]) == []


async def test_an_index_that_is_lost_costs_its_blocks_and_no_wrong_bytes(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(make_rig, tmp_path, cpu=2, disk=8)
    rig = faults.rig
    await rig.put([1, 2], durable=True)
    await rig.put([3, 4], durable=True)
    faults.order("index error half-way")
    with pytest.raises(ExhaustedError):
        await rig.put([3, 5], durable=True)
    faults.order(None)
    (rig.path / "index" / "data.mdb").write_bytes(b"no index")
    assert await faults.health.revive()
    await rig.check_disk()
    assert await rig.get([1, 2]) == 0
    assert await rig.get([3, 5]) == 2, "they were in memory"
    await rig.put([1, 2], durable=True)
    await rig.restart()
    assert await rig.get([1, 2]) == 2, "the namespace was written again, too"


@pytest.mark.parametrize("io", ["mmap", "direct", "buffered"])
async def test_a_disk_that_cannot_be_read_is_not_matched(make_rig: MakeRig, tmp_path: Path, io: DiskIo) -> None:
    faults = Faults(make_rig, tmp_path, cpu=4, disk=16, io=io)
    rig = faults.rig
    for prompt in ([1, 2], [8, 9], [3, 4]):
        await rig.put(prompt, durable=True)
    faults.order("read error")
    assert await rig.get([1, 2]) == 0, "a miss for who asks"
    assert not rig.durable.readable and "Input/output error" in rig.cache.tiers.troubles.what("disk tier")
    assert rig.rows([1, 2]) == []
    assert await rig.get([3, 4]) == 2, "from memory"
    assert rig.cache.mover.lost["not served: disk read error"] >= 1
    rig.check()
    assert await rig.put([1, 2]) == (2, 0), "computed again, beside the copy on disk"
    assert await rig.get([1, 2]) == 2
    assert await rig.put([7], durable=True) == (1, 0), "it still takes blocks"
    assert not await faults.health.revive()
    faults.order(None)
    assert await faults.health.revive()
    assert [await rig.get(prompt) for prompt in ([1, 2], [3, 4], [7])] == [2, 2, 1]
    await rig.check_disk()


async def test_a_sector_that_stays_bad_costs_its_block_alone(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(make_rig, tmp_path, cpu=2, disk=8)
    rig = faults.rig
    await rig.put([1, 2], durable=True)
    await rig.put([3, 4], durable=True)
    slab, unit = divmod(int(rig.trie.slots[rig.rows([1, 2])[1], DISK, 0]), 1 << INDEX_BITS)
    pread = rig.ops.pread

    def fail(fd: int, buffer: memoryview, offset: int) -> int:
        here = os.readlink(f"/proc/self/fd/{fd}").endswith(f"{slab:x}.slab")
        if here and offset <= unit * PAGE_BYTES < offset + len(buffer):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, buffer, offset)

    monkeypatch.setattr(rig.ops, "pread", fail)
    assert await rig.get([1, 2]) == 1
    assert await faults.health.revive()
    assert [await rig.get(prompt) for prompt in ([1, 2], [3, 4])] == [1, 2]
    assert await rig.put([1, 2], durable=True) == (1, 0)


async def test_one_line_of_log_a_trouble(make_rig: MakeRig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(make_rig, tmp_path, cpu=8, disk=8)
    faults.order("read-only file system")
    for prompt in range(3):
        with pytest.raises(ExhaustedError):
            await faults.rig.put([prompt], durable=True)
        assert not await faults.health.revive()
    errors = (record for record in caplog.records if record.levelname == "ERROR" and record.name.startswith("prefixd"))
    (line,) = [record.getMessage() for record in errors]
    assert "Read-only file system" in line and line.endswith("remount it or choose another directory")
    (trouble,) = faults.rig.cache.tiers.troubles
    assert trouble.part == "disk tier" and trouble.remedy
    faults.order(None)
    assert await faults.health.revive()
    assert not list(faults.rig.cache.tiers.troubles)


async def test_a_full_file_system_shrinks_the_tier_until_there_is_room(make_rig: MakeRig, tmp_path: Path) -> None:
    faults = Faults(make_rig, tmp_path, cpu=8, disk=64)
    rig, tiers = faults.rig, faults.rig.cache.tiers
    await rig.put([1, 2, 3, 4], durable=True)  # a whole slab
    faults.order("no room for a slab")
    assert await rig.put([5], durable=True) == (1, 0), "at the cost of another block"
    assert tiers.writes and "too few for another slab" in tiers.troubles.what("disk tier")
    assert len(rig.trie.copies(DISK)) == 4
    assert not await faults.health.revive()
    assert await rig.get([1, 2, 3, 4]) == 4
    faults.order(None)
    assert await faults.health.revive()
    assert not tiers.troubles.what("disk tier")
    assert await rig.put([6], durable=True) == (1, 0)
    assert len(rig.trie.copies(DISK)) == 5


async def test_the_index_grows_when_its_map_is_full(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd_swap.slab.index.index.MAP_BYTES", 1 << 16)
    rig = make_rig(cpu=64, disk=512)
    for prompt in range(6):
        await rig.put(list(range(100 * prompt, 100 * prompt + 60)), durable=True)
    assert not list(rig.cache.tiers.troubles)
    assert len(rig.trie) == 360


@pytest.mark.parametrize("how", ["deleted", "cut off"])
async def test_a_file_that_is_lost_under_us_costs_its_blocks_and_memory_writes_them_again(
    make_rig: MakeRig, how: str
) -> None:
    rig = make_rig(cpu=4, disk=16)
    await rig.put([1, 2], durable=True)
    await rig.put([7, 8, 9], durable=True)  # 1 is crowded out of memory
    for slab in (rig.path / "slabs").iterdir():
        if how == "deleted":
            slab.unlink()
        else:
            os.truncate(slab, 0)
    await rig.cache.mover.disk.health.inspect()
    await rig.check_disk()
    assert rig.cache.mover.lost["disk read failed"] == 5
    assert await rig.get([7, 8, 9]) == 3, "memory has it"
    await rig.cache.write_back.flush()
    await rig.restart()
    assert await rig.get([7, 8, 9]) == 3, "and wrote it to other files"


async def test_a_read_that_fails_while_writing_revives_is_not_forgotten(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(make_rig, tmp_path, cpu=4, disk=32)
    rig, tiers = faults.rig, faults.rig.cache.tiers
    for prompt in ([1, 2], [8, 9], [3, 4]):
        await rig.put(prompt, durable=True)
    faults.order("write error")
    with pytest.raises(ExhaustedError):
        await rig.put([5], durable=True)
    faults.order(None)
    assert rig.store is not None
    really, inside, go = rig.store.revive, threading.Event(), threading.Event()

    def revive(known: Any) -> Any:
        gone = really(known)
        inside.set()
        go.wait()
        return gone

    monkeypatch.setattr(rig.store, "revive", revive)
    reviving = asyncio.create_task(faults.health.revive())
    try:
        await until(inside.is_set)
        faults.order("read error")
        assert await rig.get([1, 2]) == 0
        faults.order(None)
    finally:
        go.set()
    assert not await reviving
    assert not rig.durable.readable and tiers.troubles.what("disk tier")
    assert await faults.health.revive()
    assert rig.durable.readable and not tiers.troubles.what("disk tier")
    assert [await rig.get(prompt) for prompt in ([1, 2], [8, 9])] == [2, 2]


async def test_a_file_that_is_lost_while_the_tier_cannot_grow_is_given_up_and_closed(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd.cache.disk.health.FIRST_PROBE_S", 0.01)
    monkeypatch.setattr("prefixd.cache.disk.health.LONGEST_PROBE_S", 0.01)
    faults = Faults(make_rig, tmp_path, cpu=8, disk=64)
    rig, tiers = faults.rig, faults.rig.cache.tiers
    await rig.put([1, 2, 3, 4], durable=True)  # a whole slab
    faults.order("no room for a slab")
    assert await rig.put([5], durable=True) == (1, 0)
    await forget_blocks(rig.cache.mover, rig.trie, rig.rows([5]))  # its slot is free
    assert "too few for another slab" in tiers.troubles.what("disk tier")
    (slab,) = (rig.path / "slabs").iterdir()
    assert _open_files(slab)
    slab.unlink()
    with pytest.raises(ExhaustedError, match="was deleted or cut off while in use"):
        await rig.put([6], durable=True)
    rig.cache.mover.start_probing()
    await until(lambda: len(rig.trie.copies(DISK)) == 0)
    await until(lambda: not _open_files(slab))
    assert tiers.troubles.what("disk tier"), "still no room for another file"
    faults.order(None)
    await until(lambda: not tiers.troubles.what("disk tier"))
    assert await rig.put([7], durable=True) == (1, 0)
    await rig.restart()
    assert await rig.get([7]) == 1


def _open_files(path: Path) -> list[str]:
    """This process's descriptors of a file, deleted or not."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # closed since it was listed
            continue
        if name.removesuffix(" (deleted)") == str(path):
            names.append(fd)
    return names


async def test_an_index_that_was_set_aside_and_not_made_anew_is_made_later(make_rig: MakeRig, tmp_path: Path) -> None:
    faults = Faults(make_rig, tmp_path, cpu=8, disk=64)
    rig, tiers = faults.rig, faults.rig.cache.tiers
    await rig.put([1, 2, 3, 4], durable=True)
    faults.order("index error half-way")
    with pytest.raises(ExhaustedError):
        await rig.put([99], durable=True)
    data = rig.path / "index" / "data.mdb"
    os.truncate(data, data.stat().st_size // 8192 * 4096)
    faults.obey({"mkdir": "EIO"})
    for _ in range(2):
        assert not await faults.health.revive()
        assert "Input/output error" in tiers.troubles.what("disk tier") and not data.parent.exists()
    faults.order(None)
    assert await faults.health.revive()
    await rig.check_disk()
    assert await rig.cache.write_back.flush() == 5, "what was on disk and in memory is written again"
    await rig.restart()
    assert await rig.get([1, 2, 3, 4]) == 4


async def test_an_open_cache_needs_no_more_threads(
    make_rig: MakeRig,
    tmp_path: Path,
    no_more_threads: Callable[[], AbstractContextManager[list[str]]],
) -> None:
    """Blocks are stored, evicted, read, lost and found again; the probe brings a disk that failed back."""
    faults = Faults(make_rig, tmp_path, gpu=4, cpu=8, disk=64, write_back=True)
    rig = faults.rig
    with no_more_threads() as refused:
        rig.start_write_back()
        for first in range(0, 40, 4):
            await rig.put([first, first + 1, first + 2, first + 3], durable=True)
        assert await rig.get([0, 1, 2, 3]) == 4
        rig.unhold(await rig.put_gpu([90, 91]), rig.cache.tiers.compute)
        faults.order("write error")
        await rig.put([80, 81])
        await until(lambda: not rig.cache.tiers.writes)
        faults.order(None)
        await until(lambda: rig.cache.tiers.writes)
        await rig.cache.write_back.flush()
        assert await rig.get([80, 81]) == 2
    assert set(refused) <= {"prefixd-slabs_0"}, "parts are written one after the other instead"
    assert await rig.put([100, 101, 102], durable=True) == (3, 0)


@pytest.mark.parametrize("turns", range(5))
async def test_probing_ends_as_the_disk_fails(make_rig: MakeRig, turns: int) -> None:
    rig = make_rig(cpu=4, disk=4)
    probing = rig.cache.mover.start_probing()
    await asyncio.sleep(0.05)  # it has looked at the files, and waits
    rig.cache.mover.disk.health.write_failed(StorageError("the disk is gone, as the test says"))
    for _ in range(turns):
        await asyncio.sleep(0)
    probing.cancel()
    await asyncio.wait({probing}, timeout=10)
    assert probing.done()
