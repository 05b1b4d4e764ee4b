"""The three ways to read and write slabs: the same bytes, every fault an error, no block twice in memory."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from prefixd_swap.errors import ChecksumError, LostBytesError, StorageError
from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.files.io import DiskIo, usable
from prefixd_swap.slab.files.mapped_io import MappedIo
from prefixd_swap.slab.files.pread_io import EndOfFileError
from prefixd_swap.slab.files.slab_file import INDEX_BITS
from prefixd_swap.slab.index.block_record import DiskPart, NewBlock
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.spans import Span
from tests.swap.slab.page_cache import PAGE, cached_bytes, resident_bytes

SLOT = 64 << 10
ALL: list[DiskIo] = ["mmap", "direct", "buffered"]


class Faults(FileOps):
    """Raises what `fail[name]` holds, counts calls, and runs `before_copy` before a copy out of a mapping."""

    def __init__(self) -> None:
        self.fail: dict[str, int] = {}
        self.calls: list[str] = []

    def before_copy(self) -> None:
        pass

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise OSError(self.fail[name], os.strerror(self.fail[name]))

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            self._call("open direct")
        return super().open(path, flags)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._call("pread")
        return super().pread(fd, buffer, offset)

    def map(self, fd: int, nbytes: int) -> int:
        self._call("map")
        return super().map(fd, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("unmap")
        super().unmap(address, nbytes)

    def copy_mapped(self, address: int, buffer: memoryview) -> int:
        self._call("copy_mapped")
        self.before_copy()
        return super().copy_mapped(address, buffer[:PAGE] if "short" in self.fail else buffer)


class Blocks:
    """A store of blocks of 64 KiB with random bytes."""

    def __init__(self, path: Path, io: DiskIo, ops: FileOps | None = None, blocks: int = 8) -> None:
        self.store = SlabStore.open(path, 16 * blocks * SLOT, io=io, ops=ops)
        self.content = np.random.default_rng(0).integers(0, 256, (blocks, SLOT), np.uint8)
        self.into = np.ones(SLOT, np.uint8)
        self.parts: list[DiskPart] = []
        self.slabs = path / "slabs"

    @property
    def slab(self) -> Path:
        (found,) = self.slabs.iterdir()
        return found

    def write(self) -> None:
        blocks = [
            NewBlock(b"namespac", bytes([at]) * 16, b"", b"1234", 0, [Span(content.ctypes.data, SLOT)])
            for at, content in enumerate(self.content)
        ]
        for record in self.store.write(blocks):
            assert record is not None and record.parts[0] is not None
            self.parts.append(record.parts[0])

    def read(self, at: int) -> None:
        """Must give the block's bytes, or raise."""
        self.into[:] = 1
        self.store.read(self.parts[at], Span(self.into.ctypes.data, SLOT))
        assert (self.into == self.content[at]).all()

    def check(self, at: int) -> bool:
        return self.store.check(b"namespac", bytes([at]) * 16)


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def mapped(tmp_path: Path, faults: Faults) -> Iterator[Blocks]:
    made = Blocks(tmp_path / "store", "mmap", faults)
    assert made.store.io == "mmap"
    made.write()
    faults.calls.clear()
    yield made
    made.store.close()


def mappings(path: Path) -> int:
    return sum(line.split(maxsplit=5)[-1] == str(path) for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("writes", ALL)
def test_what_one_way_wrote_every_way_reads(tmp_path: Path, writes: DiskIo) -> None:
    first = Blocks(tmp_path / "store", writes)
    first.write()
    first.store.close()
    for reads in ALL:
        blocks = Blocks(tmp_path / "store", reads)
        assert blocks.store.io == reads
        blocks.parts = first.parts
        for at in range(8):
            blocks.read(at)
            assert blocks.check(at)
        blocks.store.close()


def test_a_mapping_a_slab_which_ends_with_it(mapped: Blocks, faults: Faults) -> None:
    assert mappings(mapped.slab) == 0, "made by the first read"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(mapped.check, list(range(8)) * 4))
    mapped.read(0)
    slab = mapped.slab
    assert mappings(slab) == 1
    assert "pread" not in faults.calls and faults.calls.count("map") == 1
    mapped.store.close()
    gc.collect()
    assert mappings(slab) == 0
    assert faults.calls.count("unmap") == 1


def test_a_reader_finishes_on_a_slab_that_is_deleted_meanwhile(mapped: Blocks, faults: Faults) -> None:
    inside, go = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go.wait(30)

    faults.before_copy = wait  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(mapped.read, 3)
        assert inside.wait(30)
        slab = mapped.slab
        slab.unlink()
        mapped.store.lost_slots()
        mapped.store.close()
        assert mappings(slab) == 0 and mappings(Path(f"{slab} (deleted)")) <= 1
        go.set()
        reading.result(30)
    assert "unmap" in faults.calls


@pytest.mark.parametrize("left", [0, 3 * SLOT, 3 * SLOT + PAGE, 3 * SLOT + PAGE + 100, 4 * SLOT - 1])
def test_a_file_that_is_cut_off_is_an_error(mapped: Blocks, left: int) -> None:
    """Touching the mapping there would end the process with SIGBUS."""
    mapped.read(3)
    os.truncate(mapped.slab, left)
    with pytest.raises(LostBytesError, match=f"ends at byte {max(left, 3 * SLOT)}, inside the slot at byte {3 * SLOT}"):
        mapped.read(3)
    with pytest.raises(LostBytesError):
        mapped.read(4)
    with pytest.raises(LostBytesError):
        mapped.check(3)
    if left:
        mapped.read(2)


def test_a_file_that_is_cut_off_between_read_ahead_and_copy_is_an_error(mapped: Blocks, faults: Faults) -> None:
    faults.before_copy = lambda: os.truncate(mapped.slab, 3 * SLOT + 2 * PAGE)  # type: ignore[method-assign]
    with pytest.raises(LostBytesError, match=f"inside the slot at byte {3 * SLOT}"):
        mapped.read(3)


def test_a_mapping_that_was_longer_than_its_file_is_an_error_of_the_copy(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(2 * PAGE))
    ops, into = FileOps(), memoryview(bytearray(3 * PAGE))
    with file.open("rb") as opened:
        address = ops.map(opened.fileno(), 3 * PAGE)
        assert ops.copy_mapped(address, into) == 2 * PAGE, "the pages before the fault"
        with pytest.raises(OSError, match="Bad address") as caught:
            ops.copy_mapped(address + 2 * PAGE, into[:PAGE])
        assert caught.value.errno == errno.EFAULT
        ops.unmap(address, 3 * PAGE)


def test_a_fault_in_the_mapping_is_named_by_a_plain_read(mapped: Blocks, faults: Faults) -> None:
    faults.fail = {"copy_mapped": errno.EFAULT}
    mapped.read(1)  # whatever the fault was, the bytes can be had
    faults.fail = {"copy_mapped": errno.EFAULT, "pread": errno.EIO}
    with pytest.raises(StorageError, match=rf"Input/output error while reading the slot at byte {SLOT} .* kernel log"):
        mapped.read(1)
    with pytest.raises(StorageError, match="Input/output error"):
        mapped.check(1)
    faults.fail = {}
    mapped.read(1)


def test_a_probe_takes_the_way_that_readers_take(mapped: Blocks, faults: Faults) -> None:
    mapped.store.try_read()
    assert "pread" not in faults.calls
    for fail in ({"copy_mapped": errno.EIO}, {"copy_mapped": errno.EFAULT, "pread": errno.EIO}):
        faults.fail = fail
        with pytest.raises(StorageError, match=r"Input/output error while reading .*SUPERBLOCK"):
            mapped.store.try_read()
    faults.fail = {}
    mapped.store.try_read()
    assert faults.calls.count("map") == faults.calls.count("unmap") == 4


def test_copies_that_come_short_are_continued(mapped: Blocks, faults: Faults) -> None:
    faults.fail = {"short": 0}
    mapped.read(5)
    assert faults.calls.count("copy_mapped") == SLOT // PAGE


def test_a_flipped_byte_is_found(mapped: Blocks) -> None:
    mapped.read(2)
    with mapped.slab.open("r+b") as file:
        file.seek(mapped.parts[2].slot % (1 << INDEX_BITS) * PAGE + 4711)
        file.write(bytes([mapped.content[2, 4711] ^ 1]))
    with pytest.raises(ChecksumError):
        mapped.read(2)
    with pytest.raises(ChecksumError):
        mapped.check(2)


def test_a_slab_that_cannot_be_mapped_is_read_all_the_same(
    mapped: Blocks, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.fail = {"map": errno.ENOMEM}
    for at in range(8):
        mapped.read(at)
        assert mapped.check(at)
    (line,) = [record.getMessage() for record in caplog.records if "cannot be mapped" in record.getMessage()]
    assert "Cannot allocate memory" in line and "vm.max_map_count" in line
    assert "copy_mapped" not in faults.calls


def test_memory_holds_no_block_twice(mapped: Blocks) -> None:
    assert cached_bytes(mapped.slab) == 0, "after the write"
    for at in range(8):
        mapped.read(at)
        assert mapped.check(at)
    assert cached_bytes(mapped.slab) == 0
    assert resident_bytes(mapped.slab) == 0


def test_memory_holds_no_block_twice_when_neighbours_are_read_together(mapped: Blocks, faults: Faults) -> None:
    """A fault maps pages of the neighbour, which the neighbour's reader then cannot drop."""
    together = threading.Barrier(8)
    into = np.zeros((8, SLOT), np.uint8)

    def wait() -> None:
        together.wait(30)

    faults.before_copy = wait  # type: ignore[method-assign]

    def read(at: int) -> None:
        mapped.store.read(mapped.parts[at], Span(into[at].ctypes.data, SLOT))

    for _ in range(5):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, range(8)))
        assert (into == mapped.content).all()
        assert cached_bytes(mapped.slab) == 0
        assert resident_bytes(mapped.slab) == 0


def test_buffered_leaves_blocks_to_the_page_cache(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path / "store", "buffered")
    blocks.write()
    assert cached_bytes(blocks.slab) == 8 * SLOT
    blocks.store.close()


def test_nothing_but_the_slot_is_read_from_the_device(mapped: Blocks, faults: Faults) -> None:
    seen: list[int] = []
    unmap_pages = faults.unmap_pages

    def look_and_unmap(address: int, nbytes: int) -> None:  # after the copy, which has waited for the device
        seen.append(cached_bytes(mapped.slab))
        unmap_pages(address, nbytes)

    faults.unmap_pages = look_and_unmap  # type: ignore[method-assign]
    mapped.read(4)
    assert seen == [SLOT]


@pytest.mark.parametrize(("io", "call", "code"), [("direct", "open direct", 22), ("mmap", "copy_mapped", 1)])
def test_a_way_that_does_not_work_here_is_said_and_replaced(
    tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture, io: DiskIo, call: str, code: int
) -> None:
    faults.fail = {call: code}
    blocks = Blocks(tmp_path / "store", io, faults)
    assert blocks.store.io == "buffered"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"disk.io = {io} does not work in {tmp_path}" in line and os.strerror(code) in line
    blocks.write()
    blocks.read(0)
    blocks.store.close()


@pytest.mark.parametrize("io", ALL)
def test_a_device_that_fails_says_nothing_about_the_way(tmp_path: Path, faults: Faults, io: DiskIo) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    faults.fail = {"pread": errno.EIO, "copy_mapped": errno.EIO}
    assert usable(io, file, faults) == io


def test_bytes_beyond_the_mapping_are_not_looked_for_in_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 32)
    with file.open("rb") as opened:
        way = MappedIo(FileOps(), opened.fileno(), PAGE)
        into = memoryview(bytearray(PAGE))
        way.read(into, PAGE)
        assert into == file.read_bytes()[PAGE:]
        with pytest.raises(EndOfFileError):
            way.read(into, 2 * PAGE)
