from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixd_swap.errors import ChecksumError, DiskFullError, IntegrityError, StorageError
from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.files.io import DiskIo
from prefixd_swap.slab.files.slab_file import INDEX_BITS
from prefixd_swap.slab.files.slab_files import INDEX_RESERVE_BYTES
from prefixd_swap.slab.index import index as slab_index
from prefixd_swap.slab.index.block_record import BlockRecord, NewBlock
from prefixd_swap.slab.index.rows import Change
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.spans import Span
from tests.swap.slab.chains import opened

NS = b"namespac"
PAGE = 4096
MIB = 1 << 20


class Payload:
    """Bytes with their span; alive until the test ends, since spans only borrow."""

    alive: ClassVar[list[Payload]] = []

    def __init__(self, content: bytes) -> None:
        self.alive.append(self)
        self.content = content
        self._array = np.frombuffer(bytearray(content), dtype=np.uint8)
        self.span = Span(int(self._array.ctypes.data), len(content))


def key(number: int) -> bytes:
    return struct.pack("<QQ", number, 0)


def block(number: int, payload: Payload | Sequence[Payload | None], parent: int | None = None) -> NewBlock:
    payloads = [payload] if isinstance(payload, Payload) else payload
    return NewBlock(
        NS,
        key(number),
        b"" if parent is None else key(parent),
        struct.pack("<2I", number, 1),
        0 if parent is None else parent + 1,
        [part.span if part else None for part in payloads],
    )


def stored(store: SlabStore, record: BlockRecord, part: int = 0) -> bytes:
    disk = record.parts[part]
    assert disk is not None
    target = np.zeros(disk.nbytes, dtype=np.uint8)
    store.read(disk, Span(int(target.ctypes.data), disk.nbytes))
    return target.tobytes()


def put(store: SlabStore, number: int, content: bytes, parent: int | None = None) -> BlockRecord | None:
    payload = Payload(content)
    return store.write([block(number, payload, parent)])[0]


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


class Faults(FileOps):
    """Raises what `fail[name]` holds, and lets a test watch or hold calls."""

    def __init__(self) -> None:
        self.fail: dict[str, int] = {}
        self.left = 1 << 40
        self.short_writes = False
        self.on_sync: Callable[[], None] = lambda: None
        self.on_read: Callable[[], None] = lambda: None

    def _maybe(self, name: str) -> None:
        if name in self.fail:
            raise OSError(self.fail[name], os.strerror(self.fail[name]))

    def fallocate(self, fd: int, nbytes: int) -> None:
        self._maybe("fallocate")
        super().fallocate(fd, nbytes)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.on_read()
        self._maybe("read")
        return super().pread(fd, buffer[:PAGE] if self.short_writes else buffer, offset)

    def copy_mapped(self, address: int, buffer: memoryview) -> int:
        self.on_read()
        self._maybe("read")
        return super().copy_mapped(address, buffer[:PAGE] if self.short_writes else buffer)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._maybe("pwrite")
        return super().pwrite(fd, buffer[:PAGE] if self.short_writes else buffer, offset)

    def fdatasync(self, fd: int) -> None:
        self.on_sync()
        self._maybe("fdatasync")
        super().fdatasync(fd)

    def free_bytes(self, path: Path) -> int:
        self._maybe("free_bytes")
        return self.left


@pytest.fixture(autouse=True)
def payloads_live_for_a_test() -> Iterator[None]:
    yield
    Payload.alive.clear()


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture(params=["buffered", "direct", "mmap"])
def store(tmp_path: Path, faults: Faults, request: pytest.FixtureRequest) -> Iterator[SlabStore]:
    with opened(tmp_path / "store", 64 * PAGE, io=request.param, ops=faults) as made:
        yield made


def test_a_block_with_parts_comes_back_as_written(store: SlabStore) -> None:
    first, second = Payload(os.urandom(5000)), Payload(os.urandom(100))
    new = block(1, [first, None, second])
    (record,) = store.write([new])
    assert record is not None
    assert (record.namespace, record.key, record.parent) == (NS, key(1), b"")
    assert (record.tokens, record.depth) == (new.tokens, 0)
    assert record.parts[1] is None
    assert stored(store, record, 0) == first.content
    assert stored(store, record, 2) == second.content
    assert list(store.records()) == [record]
    assert store.used_bytes == 3 * PAGE
    store.check_integrity()
    store.remove([(NS, key(1)), (NS, key(99))])
    assert store.used_bytes == 0 and list(store.records()) == []
    store.check_integrity()


def test_the_capacity_is_filled_exactly_and_never_exceeded(store: SlabStore, tmp_path: Path) -> None:
    payload = Payload(b"x" * 8192)
    assert (store.room(8192), store.free_bytes(8000)) == (32, 64 * PAGE)
    records = store.write([block(i, payload) for i in range(33)])
    assert [record is not None for record in records] == [True] * 32 + [False]
    assert store.used_bytes == store.capacity_bytes
    assert store.room(8192) == 0
    sizes = [path.stat().st_size for path in (tmp_path / "store" / "slabs").iterdir()]
    assert sum(sizes) == 64 * PAGE
    assert all(path.stat().st_blocks * 512 >= path.stat().st_size for path in (tmp_path / "store/slabs").iterdir())
    store.check_integrity()


def test_emptied_slabs_serve_another_size(store: SlabStore) -> None:
    small = store.write([block(i, Payload(b"s")) for i in range(64)])
    assert all(small) and store.room(16 * PAGE) == 0
    store.remove([(NS, key(i)) for i in range(64)])
    assert store.room(16 * PAGE) == 4
    large = store.write([block(i, Payload(bytes([i]) * 16 * PAGE)) for i in range(5)])
    assert [record is not None for record in large] == [True] * 4 + [False]
    assert all(stored(store, record) == bytes([i]) * 16 * PAGE for i, record in enumerate(large) if record)
    store.check_integrity()


def test_no_more_slabs_are_deleted_than_another_size_needs(store: SlabStore, tmp_path: Path) -> None:
    store.write([block(i, Payload(b"s")) for i in range(64)])
    store.remove([(NS, key(i)) for i in range(64)])
    assert put(store, 100, b"L" * 2 * PAGE) is not None
    assert len(list((tmp_path / "store" / "slabs").iterdir())) == 16, "a slab serves any size"
    assert put(store, 101, b"L" * 7 * PAGE) is not None
    kept = list((tmp_path / "store" / "slabs").iterdir())
    assert len(kept) == 16 - 2 + 1, "two of four pages have made way for one of seven"
    assert store.room(1) == 64 - 9
    store.check_integrity()


def test_a_block_has_all_its_parts_or_none(store: SlabStore) -> None:
    assert put(store, 0, b"x" * 60 * PAGE) is not None
    records = store.write([block(1, [Payload(b"a"), Payload(b"b" * 5 * PAGE)]), block(2, Payload(b"c"))])
    assert records[0] is None and records[1] is not None
    assert store.used_bytes == 61 * PAGE
    store.check_integrity()


def test_writing_a_key_again_replaces_it(store: SlabStore) -> None:
    put(store, 1, b"old")
    record = put(store, 1, b"new" * 3000)
    assert record is not None and list(store.records()) == [record]
    assert stored(store, record) == b"new" * 3000
    assert store.used_bytes == 3 * PAGE
    store.check_integrity()


@pytest.mark.parametrize(
    "bad",
    [
        {"namespace": b"short"},
        {"key": b""},
        {"parent": b"x"},
        {"tokens": b"123"},
        {"depth": -1},
        {"depth": 1 << 32},
        {"parts": []},
        {"near": [1, 2]},
        {"parts": [Span(4096, 10, on_device=True)]},
    ],
)
def test_malformed_blocks_are_refused_and_leave_nothing(store: SlabStore, bad: dict[str, object]) -> None:
    good = block(1, Payload(b"good"))
    fields = {name: getattr(good, name) for name in NewBlock.__slots__} | bad
    with pytest.raises(StorageError):
        store.write([block(2, Payload(b"other")), NewBlock(**fields)])
    assert store.used_bytes == 0 and list(store.records()) == []
    store.check_integrity()


def test_one_key_twice_in_a_write_is_refused(store: SlabStore) -> None:
    payload = Payload(b"x")
    with pytest.raises(StorageError, match="twice"):
        store.write([block(1, payload), block(1, payload)])


def test_flipped_bytes_on_disk_are_never_served(store: SlabStore, tmp_path: Path) -> None:
    records = store.write([block(i, Payload(bytes([i]) * 5000)) for i in range(3)])
    part = records[1].parts[0] if records[1] else None
    assert part is not None
    slab = tmp_path / "store" / "slabs" / f"{part.slot >> INDEX_BITS:010x}.slab"
    with slab.open("r+b") as file:
        file.seek((part.slot & ((1 << INDEX_BITS) - 1)) * PAGE + 4999)
        file.write(b"\xff")
    target = np.zeros(5000, dtype=np.uint8)
    with pytest.raises(ChecksumError, match=rf"{slab}: 5000 bytes .* written were {part.checksum:016x}"):
        store.read(part, Span(int(target.ctypes.data), 5000))
    for i in (0, 2):
        record = records[i]
        assert record is not None and stored(store, record) == bytes([i]) * 5000


def test_memory_of_any_alignment_is_written_and_read(tmp_path: Path) -> None:
    memory = np.zeros(5 * MIB, np.uint8)
    memory[:] = np.random.default_rng(0).integers(0, 256, len(memory), np.uint8)
    base = -int(memory.ctypes.data) % PAGE + int(memory.ctypes.data)
    ways: list[DiskIo] = ["buffered", "direct", "mmap"]
    for io in ways:
        with opened(tmp_path / io, 64 * MIB, io=io) as store:
            for shift, nbytes in [(0, 2 * MIB), (0, 2 * MIB + 1), (64, 2 * MIB), (1, PAGE + 7), (8, MIB), (3, 1)]:
                content = memory[base - int(memory.ctypes.data) + shift :][:nbytes].tobytes()
                new = NewBlock(NS, key(nbytes + shift), b"", b"", 0, [Span(base + shift, nbytes)])
                (record,) = store.write([new])
                part = record.parts[0] if record else None
                assert record is not None and part is not None
                for into in (0, 5):
                    target = np.zeros(nbytes + PAGE + 8, np.uint8)
                    start = -int(target.ctypes.data) % PAGE + into
                    store.read(part, Span(int(target.ctypes.data) + start, nbytes))
                    assert target[start : start + nbytes].tobytes() == content
                    assert not target[start + nbytes :].any() and not target[:start].any()
                assert store.check(NS, record.key)


def test_many_slabs_become_fewer_larger_ones(tmp_path: Path) -> None:
    made: list[int] = []

    class NoSpace(FileOps):
        def fallocate(self, fd: int, nbytes: int) -> None:
            made.append(nbytes)
            os.ftruncate(fd, nbytes)

        def free_bytes(self, path: Path) -> int:
            return 1 << 50

    with opened(tmp_path / "store", 1 << 40, ops=NoSpace()) as store:
        put(store, 1, b"x" * PAGE)
        assert made == [(1 << 40) // 256]


def test_small_blocks_are_written_by_all_threads(tmp_path: Path) -> None:
    writers: set[int] = set()
    all_there = threading.Event()

    class Meeting(FileOps):
        def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
            if bytes(buffer[:1]) == b"x":
                writers.add(threading.get_ident())
                if len(writers) == 4:
                    all_there.set()
                assert all_there.wait(30), f"only {len(writers)} write at a time"
            return super().pwrite(fd, buffer, offset)

    with opened(tmp_path / "store", 4 << 20, io_threads=4, io="buffered", ops=Meeting()) as store:
        records = store.write([block(number, Payload(b"x" * 16 * PAGE)) for number in range(1, 33)])
        assert all(isinstance(record, BlockRecord) for record in records)


def test_reading_refuses_wrong_spans_and_lost_slabs(store: SlabStore, faults: Faults) -> None:
    record = put(store, 1, b"x" * 100)
    part = record.parts[0] if record else None
    assert part is not None
    with pytest.raises(StorageError, match="span of 50 bytes"):
        store.read(part, Span(4096, 50))
    with pytest.raises(StorageError, match="on a GPU"):
        store.read(part, Span(4096, 100, on_device=True))
    faults.fail["read"] = errno.EIO
    with pytest.raises(StorageError, match="kernel log"):
        store.read(part, Payload(b"y" * 100).span)
    store.remove([(NS, key(1))])
    store.write([block(i, Payload(b"z" * 8 * PAGE)) for i in range(8)])  # takes the slab's space
    with pytest.raises(StorageError, match="gone"):
        store.read(part, Payload(b"y" * 100).span)


def test_a_block_is_checked_where_it_is(store: SlabStore, tmp_path: Path, faults: Faults) -> None:
    record = put(store, 1, os.urandom(2 * MIB + 5))
    assert record is None  # larger than the store
    first, second = Payload(os.urandom(5000)), Payload(os.urandom(9000))
    (written,) = store.write([block(2, [first, None, second])])
    assert store.check(NS, key(2)) and not store.check(NS, key(3)) and not store.check(b"another!", key(2))
    part = written.parts[2] if written else None
    assert part is not None
    slab = tmp_path / "store" / "slabs" / f"{part.slot >> INDEX_BITS:010x}.slab"
    with slab.open("r+b") as file:
        file.seek((part.slot & ((1 << INDEX_BITS) - 1)) * PAGE + 8999)
        file.write(bytes([second.content[8999] ^ 1]))
    with pytest.raises(ChecksumError, match=f"{slab}: 9000 bytes"):
        store.check(NS, key(2))
    faults.fail["read"] = errno.EIO
    with pytest.raises(StorageError, match="kernel log"):
        store.check(NS, key(2))


def test_a_slot_used_again_while_it_is_checked_is_no_damage(store: SlabStore, faults: Faults) -> None:
    for replacement in (None, b"second"):
        put(store, 1, b"first")
        reads = 0

        def meanwhile(put_back: bytes | None = replacement) -> None:
            nonlocal reads
            reads += 1
            if reads == 1:
                store.remove([(NS, key(1))])
                put(store, 9, b"another block, in the slot of the first")
                if put_back is not None:
                    put(store, 1, put_back)

        faults.on_read = meanwhile
        assert store.check(NS, key(1)) is (replacement is not None)
        faults.on_read = lambda: None
        store.remove([(NS, key(1)), (NS, key(9))])


def test_short_reads_and_writes_are_continued(store: SlabStore, faults: Faults) -> None:
    faults.short_writes = True
    content = os.urandom(10_000)
    record = put(store, 1, content)
    assert record is not None and stored(store, record) == content


@pytest.mark.parametrize("call", ["fallocate", "pwrite", "fdatasync", "free_bytes"])
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EIO, StorageError),
        (errno.EROFS, StorageError),
        (errno.EACCES, StorageError),
    ],
)
def test_a_failed_write_leaks_nothing(
    store: SlabStore, faults: Faults, call: str, code: int, kind: type[StorageError]
) -> None:
    kept = put(store, 0, b"kept")
    assert kept is not None
    open_files = descriptors()
    faults.fail[call] = code
    with pytest.raises(kind):
        store.write([block(1, Payload(b"a")), block(2, Payload(b"b" * 3 * PAGE))])
    del faults.fail[call]
    faults.left += 64 * MIB  # the operator made room
    assert store.used_bytes == PAGE
    assert [record.key for record in store.records()] == [key(0)]
    store.check_integrity()
    assert stored(store, kept) == b"kept"
    record = put(store, 3, b"c" * 3 * PAGE)
    assert record is not None and stored(store, record) == b"c" * 3 * PAGE
    assert len(descriptors() - open_files) <= 1  # the new slab's
    store.check_integrity()


def test_a_slab_whose_sync_failed_is_not_trusted_again(store: SlabStore, faults: Faults, tmp_path: Path) -> None:
    """The kernel reports a lost page once: another writer's next sync would succeed over lost data."""
    kept = put(store, 0, b"kept")
    failed_slab = next((tmp_path / "store" / "slabs").iterdir())
    faults.fail["fdatasync"] = errno.EIO
    with pytest.raises(StorageError, match="syncing"):
        put(store, 1, b"lost")
    del faults.fail["fdatasync"]
    record = put(store, 2, b"elsewhere")
    assert kept is not None and kept.parts[0] is not None and record is not None and record.parts[0] is not None
    assert record.parts[0].slot >> INDEX_BITS != kept.parts[0].slot >> INDEX_BITS
    assert stored(store, kept) == b"kept"
    store.remove([(NS, key(0))])
    assert not failed_slab.exists()
    assert store.room(1) == 63
    store.check_integrity()


def test_a_full_file_system_is_reported_once_then_means_no_room(store: SlabStore, faults: Faults) -> None:
    four_slabs = store.write([block(i, Payload(b"x")) for i in range(16)])
    assert all(four_slabs)
    faults.left = INDEX_RESERVE_BYTES + PAGE
    with pytest.raises(DiskFullError, match="free space or lower"):
        store.write([block(i, Payload(b"y")) for i in range(20, 22)])
    assert store.room(1) == 0 and put(store, 30, b"z") is None
    store.remove([(NS, key(3))])
    assert store.room(1) == 1 and put(store, 31, b"z") is not None
    faults.left += 64 * MIB
    assert store.room(1) == 48 and put(store, 32, b"z") is not None
    faults.left = INDEX_RESERVE_BYTES + 40 * PAGE  # less than then, but nothing was refused since
    assert store.room(1) == 47
    store.check_integrity()


def test_the_index_full_then_usable_again(tmp_path: Path) -> None:
    """A real file size limit makes LMDB's own write fail; nothing leaks, and it goes on without the limit."""
    script = """
import resource, sys
from pathlib import Path
from prefixd_swap.slab.index.block_record import NewBlock
from prefixd_swap.errors import StorageError
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.spans import Span
import numpy as np
import numpy.typing as npt
data = np.ones(100, dtype=np.uint8)
span = Span(int(data.ctypes.data), 100)
def blocks(first):
    keys = [number.to_bytes(16, "big") for number in range(first, first + 50)]
    return [NewBlock(b"namespac", key, b"", b"t" * 2000, 0, [span]) for key in keys]
store = SlabStore.open(Path(sys.argv[1]), 4096 * 1024, slab_bytes=65536)
store.write(blocks(0))
limit = (Path(sys.argv[1]) / "index" / "data.mdb").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (max(limit, 65536 * 4), resource.RLIM_INFINITY))
written = 50
try:
    while True:
        store.write(blocks(written)); written += 50
except StorageError as error:
    assert "writing the index" in str(error) and "full" in str(error), error
assert store.used_bytes == written * 4096 < store.capacity_bytes
store.check_integrity()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert all(store.write(blocks(written)))
store.check_integrity()
store.close()
print("fine", written)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store")], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("fine"), done.stderr


def test_a_failed_removal_keeps_block_and_slot(store: SlabStore, monkeypatch: pytest.MonkeyPatch) -> None:
    record = put(store, 1, b"still here")
    assert record is not None

    def fail(self: slab_index.SlabIndex, changes: object) -> None:
        raise DiskFullError("no room for the index")

    with monkeypatch.context() as patch:
        patch.setattr(slab_index.SlabIndex, "apply", fail)
        with pytest.raises(DiskFullError):
            store.remove([(NS, key(1))])
        with pytest.raises(DiskFullError):
            put(store, 2, b"not stored")
    assert store.used_bytes == PAGE and stored(store, record) == b"still here"
    store.check_integrity()


def test_the_slots_of_many_blocks_are_freed_at_once(store: SlabStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing takes 100 us however few slots there are."""
    records = store.write([block(number, Payload(bytes(10))) for number in range(40)])
    assert all(records)
    freed: list[int] = []
    free = PageAllocator.free_many

    def counting(pages: PageAllocator, offsets: npt.NDArray[np.int64]) -> None:
        freed.append(len(offsets))
        free(pages, offsets)

    monkeypatch.setattr(PageAllocator, "free_many", counting)
    store.remove([(NS, key(number)) for number in range(40)])
    assert freed == [40]
    assert store.used_bytes == 0


def test_an_interrupted_commit_stops_the_writers(store: SlabStore, monkeypatch: pytest.MonkeyPatch) -> None:
    record = put(store, 1, b"before")

    def interrupt(self: slab_index.SlabIndex, changes: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(slab_index.SlabIndex, "apply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            put(store, 2, b"unknown")
    with pytest.raises(StorageError, match="open the store again"):
        put(store, 3, b"refused")
    assert record is not None and stored(store, record) == b"before"


def test_data_is_synced_before_the_index_names_it(
    store: SlabStore, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    apply = slab_index.SlabIndex.apply
    faults.on_sync = lambda: order.append("sync")

    def spy(self: slab_index.SlabIndex, changes: Sequence[Change]) -> list[bytes | None]:
        order.append("index")
        return apply(self, changes)

    monkeypatch.setattr(slab_index.SlabIndex, "apply", spy)
    put(store, 1, b"x")
    assert order == ["sync", "sync", "index"]  # the new slab, its data, then its name
    order.clear()
    put(store, 2, b"y")
    assert order == ["sync", "index"]


def test_waiting_writers_share_one_commit(store: SlabStore, faults: Faults) -> None:
    put(store, 0, b"warm")
    before = store.commits
    arrived, release = threading.Event(), threading.Event()

    def hold() -> None:
        arrived.set()
        assert release.wait(30)

    faults.on_sync = hold
    with ThreadPoolExecutor(8) as pool:
        leader = pool.submit(put, store, 1, b"leader")
        assert arrived.wait(30)
        faults.on_sync = lambda: None
        followers = [pool.submit(put, store, i, bytes([i])) for i in range(2, 8)]
        while store.waiting < 6:
            assert not any(follower.done() for follower in followers)
        release.set()
        records = [future.result(30) for future in [leader, *followers]]
    assert all(records) and store.commits == before + 2
    assert {record.key for record in store.records()} == {key(i) for i in range(8)}
    store.check_integrity()


def test_many_threads_write_read_and_remove(tmp_path: Path) -> None:
    with opened(tmp_path / "store", 256 * PAGE) as store:

        def worker(lane: int) -> None:
            for turn in range(12):
                number = lane * 1000 + turn
                content = struct.pack("<I", number) * (500 + 400 * lane)
                record = put(store, number, content)
                assert record is not None and stored(store, record) == content
                if turn % 3:
                    store.remove([(NS, key(number))])

        with ThreadPoolExecutor(6) as pool:
            for future in [pool.submit(worker, lane) for lane in range(6)]:
                future.result(60)
        assert len(list(store.records())) == 6 * 4


def test_the_index_grows_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_index, "MAP_BYTES", 64 * 1024)
    with opened(tmp_path / "store", 2000 * PAGE) as store:
        payload = Payload(b"x")
        assert all(store.write([block(i, payload) for i in range(1500)]))
        assert len(list(store.records())) == 1500
        assert (tmp_path / "store" / "index" / "data.mdb").stat().st_size > 64 * 1024


def test_namespaces_are_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "store", 64 * PAGE) as store:
        store.put_namespace(NS, b"{model}")
        store.put_namespace(b"another!", b"{}")
    with pytest.raises(StorageError, match="closed"):
        store.put_namespace(NS, b"")
    with opened(tmp_path / "store", 64 * PAGE) as store:
        assert store.namespaces() == {NS: b"{model}", b"another!": b"{}"}


def test_close_waits_for_a_write_and_closes_everything(tmp_path: Path, faults: Faults) -> None:
    before = descriptors()
    store = SlabStore.open(tmp_path / "store", 64 * PAGE, ops=faults)
    put(store, 0, b"warm")
    arrived, release = threading.Event(), threading.Event()

    def hold() -> None:
        arrived.set()
        assert release.wait(30)

    faults.on_sync = hold
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(put, store, 1, b"x")
        assert arrived.wait(30)
        closing = pool.submit(store.close)
        assert not closing.done()
        release.set()
        assert writing.result(30) is not None
        closing.result(30)
    store.close()
    with pytest.raises(StorageError, match="closed"):
        put(store, 2, b"x")
    assert not descriptors() - before


def test_two_sizes_share_a_tier_by_pages(tmp_path: Path) -> None:
    """64 KiB in a tier full of 4 KiB slots costs one page, not a slab."""
    with opened(tmp_path / "store", 16 * MIB) as store:
        payload = Payload(b"s" * PAGE)
        records = store.write([block(number, payload) for number in range(16 * 256)])
        slots = np.array([record.parts[0].slot for record in records if record and record.parts[0]], np.int64)
        assert len(slots) == 16 * 256 and store.room(64 * 1024) == 0
        worth = np.random.default_rng(0).random(len(slots))
        victims = store.choose_victims(64 * 1024, 1, slots, worth)
        assert len(victims.positions) == 16 and victims.slots == 1
        store.remove([(NS, key(number)) for number in victims.positions.tolist()])
        assert store.room(64 * 1024) == 1 and put(store, 5000, b"L" * 64 * 1024) is not None
        assert store.used_bytes == store.capacity_bytes


def test_a_slot_larger_than_whole_slabs_has_room_when_some_are_empty(tmp_path: Path) -> None:
    with opened(tmp_path / "store", 64 * PAGE) as store:
        payload = Payload(b"s")
        records = store.write([block(number, payload) for number in range(64)])
        slots = np.array([record.parts[0].slot for record in records if record and record.parts[0]], np.int64)
        worth = np.arange(64.0)
        evictable = np.ones(64, np.bool_)
        evictable[5] = False
        victims = store.choose_victims(9 * PAGE, 1, slots, worth, evictable)
        assert (victims.slots, victims.positions.tolist()) == (1, [0, 1, 2, 3, *range(8, 16)]), "three slabs of four"
        store.remove([(NS, key(number)) for number in victims.positions.tolist()])
        assert store.room(9 * PAGE) == 1 and put(store, 100, b"L" * 9 * PAGE) is not None


def test_what_contradicts_the_slabs_is_found(store: SlabStore) -> None:
    put(store, 1, b"x")
    slabs = store._slabs
    (slab,) = slabs._slabs.values()

    def broken(message: str) -> None:
        with pytest.raises(IntegrityError, match=message):
            store.check_integrity()

    slab.failed = True
    broken("failed is True")
    slab.failed = False
    slabs.allocated_bytes += 1
    broken("bytes are allocated")
    slabs.allocated_bytes -= 1
    slabs.capacity_bytes = PAGE
    broken("bytes are allocated")
    slabs.capacity_bytes = 64 * PAGE
    del slabs._slabs[slab.number]
    broken("the slabs are")
    slabs._slabs[slab.number] = slab
    slabs._pages.used_bytes += 1
    broken("are counted")
    slabs._pages.used_bytes -= 1
    store.check_integrity()


def test_a_prefix_lies_together_on_disk(tmp_path: Path) -> None:
    with opened(tmp_path / "store", 64 * MIB) as store:
        store.room(64 * 1024)  # pages of 64 KiB
        payload = Payload(b"x" * PAGE)
        homes = []
        last: list[int | None] = [None, None]
        for depth in range(4):
            for prompt in range(2):
                parent = None if depth == 0 else prompt * 100 + depth - 1
                new = replace(block(prompt * 100 + depth, payload, parent), near=[last[prompt]])
                (record,) = store.write([new])
                assert record is not None and record.parts[0] is not None
                last[prompt] = record.parts[0].slot
                homes.append((prompt, record.parts[0].slot >> 4))
        assert len(set(homes)) == 2 and len({home for _, home in homes}) == 2
        store.write([block(500, payload), *(block(501 + at, payload, 500 + at) for at in range(10))])
        keys = {key(500 + at) for at in range(11)}
        found = [record.parts[0].slot >> 4 for record in store.records() if record.parts[0] and record.key in keys]
        assert len(set(found)) == 1, "parents in the same write are known"


class StoreModel(RuleBasedStateMachine):
    """The store against a dict, through removals, reopening, and copies taken while it is open (a crash)."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="slab-model-"))
        self.generation = 0
        self.next = 0
        self.model: dict[int, tuple[int | None, bytes]] = {}
        self.records: dict[int, BlockRecord] = {}
        self.pinned: set[int] = set()

    def _open(self) -> None:
        self.store = SlabStore.open(self.root / str(self.generation), 48 * PAGE)

    @initialize()
    def first(self) -> None:
        self._open()

    @rule(
        sizes=st.lists(st.sampled_from([1, 4096, 5000, 12_288, 40_000]), min_size=1, max_size=4),
        data=st.data(),
    )
    def write(self, sizes: list[int], data: st.DataObject) -> None:
        parents = [data.draw(st.sampled_from([None, *self.model])) for _ in sizes]
        contents = [os.urandom(size) for size in sizes]
        payloads = [Payload(content) for content in contents]
        numbers = range(self.next, self.next + len(sizes))
        self.next += len(sizes)
        room = self.store.room(sizes[0])
        written = self.store.write([block(*fields) for fields in zip(numbers, payloads, parents, strict=True)])
        assert (written[0] is None) == (room == 0)
        for number, parent, content, record in zip(numbers, parents, contents, written, strict=True):
            if record is not None:
                self.model[number] = (parent, content)
                self.records[number] = record

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=5, unique=True))
        self.store.remove([(NS, key(number)) for number in numbers])
        for number in numbers:
            del self.model[number], self.records[number]

    @rule(numbers=st.sets(st.integers(0, 12), max_size=5), pinned=st.booleans())
    def pin(self, numbers: set[int], pinned: bool) -> None:
        there = numbers & self.model.keys()
        assert self.store.pin([(NS, key(number)) for number in numbers], pinned) == len(there)
        self.pinned = self.pinned | there if pinned else self.pinned - there

    @rule(crash=st.booleans())
    def reopen(self, crash: bool) -> None:
        if crash:
            shutil.copytree(self.root / str(self.generation), self.root / str(self.generation + 1))
        self.store.close()
        self.generation += crash
        self._open()
        orphans = 0
        for number in sorted(self.model):  # a parent's number is lower
            parent = self.model[number][0]
            if parent is not None and parent not in self.model:
                del self.model[number], self.records[number]
                orphans += 1
        assert (self.store.recovery.lost_parents, self.store.recovery.lost_slots) == (orphans, 0)
        assert self.store.recovery.kept == len(self.model)

    @invariant()
    def store_is_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check_integrity()
        self.pinned &= self.model.keys()
        assert self.store.pins() == [(NS, key(number)) for number in sorted(self.pinned)]
        found = list(self.store.records())
        assert {record.key: record for record in found} == {r.key: r for r in self.records.values()}
        depths = [record.depth for record in found]
        assert depths == sorted(depths)
        for number, (_, content) in self.model.items():
            assert stored(self.store, self.records[number]) == content

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.root)


TestStoreModel = pytest.mark.slow(StoreModel.TestCase)
TestStoreModel.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
