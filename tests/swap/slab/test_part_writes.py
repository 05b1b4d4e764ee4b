"""Parts written at once: neighbours by one call, the bytes and checksums right wherever they lie in memory."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixd_swap.errors import StorageError
from prefixd_swap.slab import part_writes, writer
from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.files.io import DiskIo
from prefixd_swap.slab.index.block_record import BlockRecord, DiskPart, NewBlock
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.slots import PAGE_BYTES, round_to_slot
from prefixd_swap.spans import Span
from tests.swap.slab.chains import opened
from tests.waiting import wait_until

NS = b"namespac"
KIB = 1 << 10


class Device(FileOps):
    """Remembers the bytes of each write to a slab; fails those of `bad` bytes or more; starts none before `until`."""

    def __init__(self) -> None:
        self.writes: list[int] = []
        self.bad: int | None = None
        self.until: threading.Event | None = None
        self.late = False
        """Whether `until` did not come."""

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".slab"):
            self.writes.append(len(buffer))
            self.late |= self.until is not None and not self.until.wait(20)
            if self.bad is not None and len(buffer) >= self.bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pwrite(fd, buffer, offset)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture(params=["direct", "buffered", "mmap"])
def store(tmp_path: Path, device: Device, request: pytest.FixtureRequest) -> Iterator[SlabStore]:
    io: DiskIo = request.param
    with opened(tmp_path / "store", 64 << 20, io=io, ops=device) as made:
        yield made


def chain(spans: list[list[Span | None]]) -> list[NewBlock]:
    keys = [at.to_bytes(16, "big") for at in range(len(spans))]
    return [
        NewBlock(NS, key, before, b"1234", at, spans[at]) for at, (before, key) in enumerate(pairwise([b"", *keys]))
    ]


def check(store: SlabStore, records: list[BlockRecord | None], contents: list[list[bytes]]) -> None:
    for record, content in zip(records, contents, strict=True):
        assert record is not None
        parts = [part for part in record.parts if part is not None]
        assert [part.checksum for part in parts] == [xxhash.xxh3_64_intdigest(each) for each in content]
        assert [read(store, part) for part in parts] == content
    store.check_integrity()


def read(store: SlabStore, part: DiskPart) -> bytes:
    into = np.ones(part.nbytes, np.uint8)
    store.read(part, Span(int(into.ctypes.data), part.nbytes))
    return into.tobytes()


def memory(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Random bytes that begin at a page."""
    whole = np.random.default_rng(nbytes).integers(0, 256, nbytes + PAGE_BYTES, np.uint8)
    start = -int(whole.ctypes.data) % PAGE_BYTES
    return whole[start : start + nbytes]


@pytest.mark.parametrize("nbytes", [4 * KIB, 64 * KIB, 256 * KIB])
def test_neighbours_in_slots_and_memory_are_one_write(store: SlabStore, device: Device, nbytes: int) -> None:
    count = (4 << 20) // nbytes
    blocks = memory(4 << 20).reshape(count, nbytes)
    records = store.write(chain([[Span(each.ctypes.data, nbytes)] for each in blocks]))
    assert device.writes == [1 << 20] * 4
    check(store, records, [[each.tobytes()] for each in blocks])


def test_small_neighbours_that_are_apart_in_memory_are_one_write(store: SlabStore, device: Device) -> None:
    blocks = memory(4 << 20).reshape(64, 64 * KIB)[::-1]
    records = store.write(chain([[Span(each.ctypes.data, 64 * KIB)] for each in blocks]))
    assert device.writes == [1 << 20] * 4
    check(store, records, [[each.tobytes()] for each in blocks])


def test_large_neighbours_that_are_apart_in_memory_are_not_copied(store: SlabStore, device: Device) -> None:
    blocks = memory(4 << 20).reshape(16, 256 * KIB)[::-1]
    records = store.write(chain([[Span(each.ctypes.data, 256 * KIB)] for each in blocks]))
    assert device.writes == [256 * KIB] * 16
    check(store, records, [[each.tobytes()] for each in blocks])


def test_each_part_of_a_chain_lies_behind_the_one_of_the_block_before(store: SlabStore) -> None:
    sizes = (8 * KIB, 64 * KIB, 5000)
    blocks = memory(64 * 128 * KIB).reshape(64, 128 * KIB)
    starts = (0, 8 * KIB, 72 * KIB)
    spans: list[list[Span | None]] = [
        [Span(each.ctypes.data + start, size) for start, size in zip(starts, sizes, strict=True)] for each in blocks
    ]
    first = store.write(chain(spans)[:32])
    assert first[31] is not None
    near = [None if part is None else part.slot for part in first[31].parts]
    later = store.write([replace(block, near=near) for block in chain(spans)[32:]])
    contents = [
        [each[start : start + size].tobytes() for start, size in zip(starts, sizes, strict=True)] for each in blocks
    ]
    check(store, first + later, contents)
    for part, size in enumerate(sizes):
        slots = [record.parts[part] for record in first + later if record is not None]
        steps = [after.slot - before.slot for before, after in pairwise(slots) if before and after]
        assert steps.count(round_to_slot(size) // PAGE_BYTES) >= 60  # all but where a page ends


def test_several_chains_of_a_batch_lie_apart(store: SlabStore) -> None:
    """One after the other, one that continues another's block, a block alone, and one of other sizes."""
    blocks = memory(50 * 64 * KIB).reshape(50, 64 * KIB)
    firsts = {0: b"", 16: b"", 32: bytes(15) + b"\3", 48: b"", 49: bytes(15) + b"\x30"}
    new: list[NewBlock] = []
    for at, block in enumerate(chain([[Span(each.ctypes.data, 64 * KIB)] for each in blocks])):
        parent = firsts.get(at, block.parent)
        depth = new[int.from_bytes(parent, "big")].depth + 1 if parent else 0
        new.append(replace(block, parent=parent, depth=depth))
    new[49] = replace(new[49], parts=[Span(blocks[49].ctypes.data, 8 * KIB)])
    records = store.write(new)
    contents = [[each.tobytes()] for each in blocks]
    contents[49] = [blocks[49, : 8 * KIB].tobytes()]
    check(store, records, contents)
    slots = [part.slot for record in records if record is not None and (part := record.parts[0]) is not None]
    for first in (0, 16, 32):
        assert [slot - slots[first] for slot in slots[first : first + 16]] == [16 * at for at in range(16)]


def test_a_chain_lies_behind_the_block_that_it_continues(store: SlabStore) -> None:
    """Where that block's page has room, be it in the same batch or not."""
    blocks = memory(8 * 4 * KIB).reshape(8, 4 * KIB)
    new = chain([[Span(each.ctypes.data, 4 * KIB)] for each in blocks])
    first, page = store.write(new[:1])[0], store._slabs._pages.page_bytes // (4 * KIB)
    count, span = 3 * page, Span(blocks[0].ctypes.data, 4 * KIB)
    many = [replace(block, namespace=b"elsewher") for block in chain([[span] for _ in range(count)])]
    assert first is not None and page >= 8
    store.remove([(NS, new[0].key)])
    slots = [part.slot for record in store.write(many) if record is not None and (part := record.parts[0]) is not None]
    free = [*range(count - 1, count - page // 2 - 1, -1), *range(page - 1, page // 2 - 1, -1)]
    store.remove([(b"elsewher", many[at].key) for at in free])
    batch = [
        replace(new[0], near=[slots[count - page + 1]]),
        replace(new[7], parent=b""),
        replace(new[1], parent=new[0].key, near=[slots[1]]),  # its parent's place is known better by now
        new[2],
        replace(new[3], parent=new[0].key),
    ]
    found = [part.slot for record in store.write(batch) if record is not None and (part := record.parts[0]) is not None]
    other, behind = found.pop(1), count - page // 2
    assert found == slots[behind : behind + 4] and other not in slots[-page:]


def test_another_namespace_is_another_chain(store: SlabStore) -> None:
    """Keys may be the same there."""
    blocks = memory(4 * 64 * KIB).reshape(4, 64 * KIB)
    new = chain([[Span(each.ctypes.data, 64 * KIB)] for each in blocks])
    new[1] = replace(new[1], namespace=b"elsewher")
    assert [len(each) for each in writer._chains(new)] == [1, 1, 2]
    assert list(writer._chains([])) == []


def test_a_chain_without_slots_for_all_parts_takes_none(store: SlabStore, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = memory(8 * 72 * KIB).reshape(8, 72 * KIB)
    new = chain([[Span(each.ctypes.data, 64 * KIB), Span(each.ctypes.data + 64 * KIB, 8 * KIB)] for each in blocks])
    allocate_many = store._slabs.allocate_many

    def refuse_small(nbytes: int, *given: Any) -> Any:
        if nbytes == 8 * KIB:
            raise StorageError("no slab could be made")
        return allocate_many(nbytes, *given)

    monkeypatch.setattr(store._slabs, "allocate_many", refuse_small)
    with pytest.raises(StorageError, match="no slab"):
        store.write(new)
    assert store.used_bytes == 0


def test_a_chain_is_stored_as_far_as_there_is_room(store: SlabStore) -> None:
    blocks = memory(80 << 20).reshape(80, 1 << 20)
    room = store.room(1 << 20)
    records = store.write(chain([[Span(each.ctypes.data, 1 << 20)] for each in blocks]))
    stored = [record for record in records if record is not None]
    assert 60 <= len(stored) == room and not any(records[room:])
    check(store, list(stored), [[each.tobytes()] for each in blocks[:room]])


def test_a_write_that_fails_stores_nothing_and_its_slots_are_free(store: SlabStore, device: Device) -> None:
    blocks = memory(4 << 20).reshape(64, 64 * KIB)
    new = chain([[Span(each.ctypes.data, 64 * KIB)] for each in blocks])
    device.bad = 1 << 20
    with pytest.raises(StorageError, match="kernel log"):
        store.write(new)
    assert store.used_bytes == 0 and list(store.records()) == []
    device.bad = None
    check(store, store.write(new), [[each.tobytes()] for each in blocks])


def test_checksums_and_records_are_made_while_the_device_writes(
    store: SlabStore, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = threading.Event()
    describe = writer._describe

    def announced(*given: Any) -> Any:
        result = describe(*given)
        described.set()
        return result

    monkeypatch.setattr(writer, "_describe", announced)
    device.until = described
    blocks = memory(4 << 20).reshape(4, 1 << 20)
    check(
        store,
        store.write(chain([[Span(each.ctypes.data, 1 << 20)] for each in blocks])),
        [[b.tobytes()] for b in blocks],
    )
    assert len(device.writes) == 4 and not device.late


def test_records_are_made_when_all_threads_write(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    describe = writer._describe
    device.until = described = threading.Event()

    def announced(*given: Any) -> Any:
        order.append("records")
        described.set()
        return describe(*given)

    monkeypatch.setattr(writer, "_describe", announced)
    blocks = memory(4 << 20).reshape(4, 1 << 20)
    with opened(tmp_path / "store", 64 << 20, ops=device, io_threads=2) as store:
        pool = store._writer._threads()
        assert pool is not None
        busy = [threading.Event(), threading.Event()]
        others = [pool.submit(each.wait, 20) for each in busy]
        with ThreadPoolExecutor(1) as caller:
            written = caller.submit(store.write, chain([[Span(each.ctypes.data, 1 << 20)] for each in blocks]))
            for writing, each in enumerate(busy):
                wait_until(lambda: pool._work_queue.qsize() + len(device.writes) == 2)
                wait_until(lambda writing=writing: len(device.writes) == writing)  # type: ignore[misc]
                time.sleep(0.05)  # in which nothing may happen
                order.append(f"{writing} threads write")
                each.set()
            check(store, written.result(), [[block.tobytes()] for block in blocks])
        assert all(other.result() for other in others)
    assert order == ["0 threads write", "1 threads write", "records"] and not device.late


def test_slots_are_free_only_when_no_thread_writes_also_if_a_job_is_refused(
    store: SlabStore, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = memory(4 << 20).reshape(4, 1 << 20)
    new = chain([[Span(each.ctypes.data, 1 << 20)] for each in blocks])
    submit, jobs = ThreadPoolExecutor.submit, list[Any]()
    device.until = until = threading.Event()

    def refusing(pool: ThreadPoolExecutor, call: Any, *job: Any) -> Any:
        if call is not part_writes._write:
            return submit(pool, call, *job)
        if len(jobs) == 2:
            until.set()
            raise MemoryError("no memory for a third job")
        jobs.append(submit(pool, call, *job))
        return jobs[-1]

    def free(slots: list[int]) -> None:
        assert len(slots) == 4 and all(job.done() for job in jobs)
        store._writer._free_slots(slots)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refusing)
    monkeypatch.setattr(store._writer, "free", free)
    with pytest.raises(MemoryError):
        store.write(new)
    assert store.used_bytes == 0


def test_a_span_on_a_gpu_is_refused(store: SlabStore) -> None:
    blocks = memory(8 * KIB).reshape(2, 4 * KIB)
    spans: list[list[Span | None]] = [[Span(each.ctypes.data, 4 * KIB, on_device=True)] for each in blocks]
    with pytest.raises(StorageError, match="on a GPU"):
        store.write(chain(spans))
    assert store.used_bytes == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_parts_of_any_sizes_and_places_come_back(store: SlabStore, data: st.DataObject) -> None:
    sizes = st.sampled_from([1, 100, 4096, 5000, 8192, 65536, 65537, 128 * KIB, (1 << 20) + 1])
    shape = data.draw(st.lists(sizes, min_size=1, max_size=3))
    count = data.draw(st.integers(1, 8))
    step = sum(map(round_to_slot, shape))
    apart = data.draw(st.sampled_from([0, 1, 4096]))
    whole = memory((step + apart) * count)
    order = data.draw(st.permutations(range(count)))
    spans: list[list[Span | None]] = []
    contents: list[list[bytes]] = []
    for at in order:
        start = at * (step + apart)
        starts = [start + sum(map(round_to_slot, shape[:part])) for part in range(len(shape))]
        spans.append([Span(whole.ctypes.data + begin, size) for begin, size in zip(starts, shape, strict=True)])
        contents.append([whole[begin : begin + size].tobytes() for begin, size in zip(starts, shape, strict=True)])
    check(store, store.write(chain(spans)), contents)
    store.remove([(NS, record.key) for record in store.records()])
    assert store.used_bytes == 0
