"""Many parts read at once: small neighbours by one call, and each part's fault its own."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from prefixd_swap.errors import ChecksumError, LostBytesError
from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.files.io import DiskIo
from prefixd_swap.slab.files.slab_file import INDEX_BITS
from prefixd_swap.slab.index.block_record import DiskPart, NewBlock
from prefixd_swap.slab.reader import PartRead
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.slots import PAGE_BYTES, round_to_slot
from prefixd_swap.spans import Span


class Device(FileOps):
    """Counts reads, and fails those that touch the byte `bad` of a file."""

    def __init__(self) -> None:
        self.reads = 0
        self.bad: int | None = None

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.reads += 1
        if self.bad is not None and offset <= self.bad < offset + len(buffer):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pread(fd, buffer, offset)

    def copy_mapped(self, address: int, buffer: memoryview) -> int:
        self.reads += 1
        return super().copy_mapped(address, buffer)


class Parts:
    """A prompt of blocks of one part each, which lie one behind the other."""

    def __init__(self, path: Path, nbytes: int, count: int, io: DiskIo) -> None:
        self.device = Device()
        self.slabs = path / "store" / "slabs"
        self.store = SlabStore.open(path / "store", 64 << 20, io=io, ops=self.device)
        self.content = np.random.default_rng(0).integers(0, 256, (count, nbytes), np.uint8)
        keys = [at.to_bytes(16, "big") for at in range(count)]
        blocks = [
            NewBlock(b"namespac", key, before, b"1234", at, [Span(self.content[at].ctypes.data, nbytes)])
            for at, (before, key) in enumerate(pairwise([b"", *keys]))
        ]
        self.parts: list[DiskPart] = []
        for record in self.store.write(blocks):
            assert record is not None and record.parts[0] is not None
            self.parts.append(record.parts[0])
        self.into = np.zeros_like(self.content)
        self.device.reads = 0

    def slab_of(self, at: int) -> Path:
        return self.slabs / f"{self.parts[at].slot >> INDEX_BITS:010x}.slab"

    def byte_of(self, at: int) -> int:
        return (self.parts[at].slot % (1 << INDEX_BITS)) * PAGE_BYTES

    def read(self, order: Sequence[int]) -> list[PartRead]:
        """Reads these parts; those without an error must be right, and no other memory may be written."""
        self.into[:] = 0
        chosen = [self.parts[at] for at in order]
        addresses = [self.into[at].ctypes.data for at in order]
        errors = self.store.read_all(chosen, addresses, self.content.shape[1])
        assert len(errors) == len(order)
        good = [at for at, error in zip(order, errors, strict=True) if error is None]
        assert (self.into[good] == self.content[good]).all()
        others = np.setdiff1d(np.arange(len(self.content)), order)
        assert not self.into[others].any()
        return errors


Make = Callable[..., Parts]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Parts] = []

    def one(nbytes: int, count: int, io: DiskIo = "direct") -> Parts:
        made.append(Parts(tmp_path, nbytes, count, io))
        return made[-1]

    yield one
    for parts in made:
        parts.store.close()


@pytest.mark.parametrize("io", ["direct", "mmap", "buffered"])
@pytest.mark.parametrize("nbytes", [100, 4096, 5000, 65536])
def test_small_neighbours_are_read_together(make: Make, nbytes: int, io: DiskIo) -> None:
    count = 3 * (1 << 20) // round_to_slot(nbytes) // 2
    parts = make(nbytes, count, io)
    assert parts.read(range(count)) == [None] * count
    assert parts.device.reads == 2, "a megabyte each"


@pytest.mark.parametrize("nbytes", [4096, 65537])
def test_parts_in_any_order_come_to_their_own_places(make: Make, nbytes: int) -> None:
    parts = make(nbytes, 24)
    order: npt.NDArray[np.int64] = np.random.default_rng(1).permutation(24)[:17]
    assert parts.read(order.tolist()) == [None] * 17
    assert parts.read([]) == []


def test_large_parts_are_read_together_where_their_memory_is_adjacent(make: Make) -> None:
    parts = make(128 << 10, 16)
    assert parts.read(range(16)) == [None] * 16
    assert parts.device.reads == 2, "1 MiB at a time"


def test_large_parts_are_read_straight_to_where_they_go(make: Make) -> None:
    parts = make(128 << 10, 4)
    parts.into[:] = 0
    order = [2, 0, 3, 1]  # of the memory, for parts in the order of their slots
    errors = parts.store.read_all(parts.parts, [parts.into[at].ctypes.data for at in order], 128 << 10)
    assert errors == [None] * 4 and parts.device.reads == 4
    assert (parts.into[order] == parts.content).all()


def test_a_wrong_byte_costs_its_part_alone(make: Make) -> None:
    parts = make(4096, 16)
    with parts.slab_of(5).open("r+b") as file:
        file.seek(parts.byte_of(5) + 17)
        file.write(bytes([parts.content[5, 17] ^ 1]))
    errors = parts.read(range(16))
    assert [at for at, error in enumerate(errors) if error] == [5]
    assert isinstance(errors[5], ChecksumError) and f"the slot at byte {parts.byte_of(5)} of" in str(errors[5])


def test_a_bad_sector_costs_its_part_alone(make: Make) -> None:
    parts = make(4096, 16)
    parts.device.bad = parts.byte_of(9) + 1000
    errors = parts.read(range(16))
    assert [at for at, error in enumerate(errors) if error] == [9]
    assert f"Input/output error while reading the slot at byte {parts.byte_of(9)} of" in str(errors[9])


def test_what_a_file_has_lost_costs_no_part_before_it(make: Make) -> None:
    parts = make(4096, 16)
    os.truncate(parts.slab_of(0), parts.byte_of(11))
    errors = parts.read(range(16))
    assert [at for at, error in enumerate(errors) if error] == [11, 12, 13, 14, 15]
    assert all(isinstance(error, LostBytesError) for error in errors[11:])
