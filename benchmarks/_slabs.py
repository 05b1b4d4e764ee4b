"""The disk tier's store against plain files: throughput in the same run, and what a million records cost."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _harness
from prefixd_swap import BlockRecord, DiskPart, NewBlock, SlabStore, Span
from prefixd_swap.block_record import encode_record, index_key
from prefixd_swap.file_ops import FileOps
from prefixd_swap.slab_file import INDEX_BITS
from prefixd_swap.slab_index import SlabIndex

_NAMESPACE = b"namespac"
_SLOT_BYTES = 4096
_SLAB_SLOTS = 16384
_TOKENS = 16


class Memory:
    """`blocks` blocks in memory of the arena's kind."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        fd = os.memfd_create("prefixd-benchmark")
        os.ftruncate(fd, blocks * block_bytes)
        self._map = mmap.mmap(fd, blocks * block_bytes)
        os.close(fd)
        self.bytes = np.frombuffer(self._map, np.uint8)

    def view(self, block: int) -> memoryview:
        """A block's bytes."""
        return memoryview(self._map)[block * self.block_bytes : (block + 1) * self.block_bytes]

    def span(self, block: int) -> Span:
        """A block's bytes as the store takes them."""
        return Span(int(self.bytes.ctypes.data) + block * self.block_bytes, self.block_bytes)


class PlainFile:
    """A preallocated file that `depth` threads write and read, a block a call."""

    def __init__(self, path: Path, blocks: int, block_bytes: int, pool: ThreadPoolExecutor, direct: bool) -> None:
        self._blocks, self._block_bytes, self._pool = blocks, block_bytes, pool
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o600)
        os.posix_fallocate(self._fd, 0, blocks * block_bytes)
        os.fsync(self._fd)

    def store(self, source: Memory, batch: int) -> None:
        """Write all blocks, durably after each batch."""
        for start in range(0, self._blocks, batch):
            numbers = range(start, min(start + batch, self._blocks))
            list(self._pool.map(lambda number: self._all(os.pwritev, source, number), numbers))
            os.fdatasync(self._fd)

    def load(self, target: Memory) -> None:
        """Read all blocks."""
        list(self._pool.map(lambda number: self._all(os.preadv, target, number), range(self._blocks)))

    def forget(self) -> None:
        """Drop it from the page cache."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _all(self, call: Callable[[int, list[memoryview], int], int], memory: Memory, number: int) -> None:
        if call(self._fd, [memory.view(number)], number * self._block_bytes) != self._block_bytes:
            raise _harness.BenchmarkError("a plain read or write came back short")


class Store:
    """A `SlabStore` that is written a batch a call, as the daemon does, and read by `depth` threads."""

    def __init__(
        self, path: Path, blocks: int, block_bytes: int, pool: ThreadPoolExecutor, depth: int, direct: bool
    ) -> None:
        self._blocks, self._pool, self._path = blocks, pool, path
        capacity = 2 * blocks * block_bytes
        self.store_itself = SlabStore.open(path, capacity, direct=direct, io_threads=depth)
        self._records: list[BlockRecord] = []

    def clear(self) -> None:
        """Remove all blocks."""
        self.store_itself.remove([(record.namespace, record.key) for record in self._records])
        self._records = []

    def store(self, source: Memory, batch: int) -> None:
        """Write all blocks, durably after each batch."""
        for start in range(0, self._blocks, batch):
            numbers = range(start, min(start + batch, self._blocks))
            records = self.store_itself.write([_block(number, [source.span(number)]) for number in numbers])
            self._records += [record for record in records if record is not None]
        if len(self._records) != self._blocks:
            raise _harness.BenchmarkError(f"the store took {len(self._records)} of {self._blocks} blocks")

    def load(self, target: Memory) -> None:
        """Read all blocks, verified."""

        def read(number: int, record: BlockRecord) -> None:
            for part in record.parts:
                if part is not None:
                    self.store_itself.read(part, target.span(number))

        list(self._pool.map(read, range(self._blocks), self._records))

    def forget(self) -> None:
        """Drop its slabs from the page cache."""
        for slab in (self._path / "slabs").iterdir():
            fd = os.open(slab, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def close(self) -> None:
        """Close the store."""
        self.store_itself.close()


def throughput(folder: Path, block_bytes: int, blocks: int, batch: int, depth: int, rounds: int) -> dict[str, Any]:
    """Medians over rounds in which every way takes its turn, after one that is not counted; in GB/s."""
    source, target = Memory(blocks, block_bytes), Memory(blocks, block_bytes)
    source.bytes[:] = np.random.default_rng(0).integers(0, 256, len(source.bytes), np.uint8)
    target.bytes[:] = 1
    times: dict[str, list[float]] = {}
    with ThreadPoolExecutor(depth) as pool:
        ways: dict[str, PlainFile | Store] = {
            "raw_direct": PlainFile(folder / "direct", blocks, block_bytes, pool, True),
            "store_direct": Store(folder / "store-direct", blocks, block_bytes, pool, depth, True),
            "raw_buffered": PlainFile(folder / "buffered", blocks, block_bytes, pool, False),
            "store_buffered": Store(folder / "store-buffered", blocks, block_bytes, pool, depth, False),
        }
        with _harness.progress("rounds", rounds + 1) as step:
            for turn in range(rounds + 1):
                for name, way in ways.items():
                    if isinstance(way, Store):
                        way.clear()
                    with _timed(times, f"{name}_store", turn > 0):
                        way.store(source, batch)
                    way.forget()
                    target.bytes[:] = 1
                    with _timed(times, f"{name}_load", turn > 0):
                        way.load(target)
                    if not np.array_equal(source.bytes, target.bytes):
                        raise _harness.BenchmarkError(f"{name}: the bytes read are not the bytes written")
                    way.forget()
                step()
        for way in ways.values():
            way.close()
    gbps = {name: blocks * block_bytes / float(np.median(taken)) / 1e9 for name, taken in times.items()}
    ratios = {
        f"{kind}{what}_ratio": gbps[f"store_{way}_{what}"] / gbps[f"raw_{way}_{what}"]
        for kind, way in (("", "direct"), ("buffered_", "buffered"))  # direct is what the store does by default
        for what in ("store", "load")
    }
    return {f"{name}_gbps": round(value, 3) for name, value in gbps.items()} | {
        name: round(value, 3) for name, value in ratios.items()
    }


def fill(path: Path, blocks: int) -> None:
    """A store of `blocks` blocks of one 4 KiB slot in chains of 500, with a real index and slabs that are holes."""
    capacity = blocks * _SLOT_BYTES
    SlabStore.open(path, capacity).close()
    for first in range(0, blocks, _SLAB_SLOTS):
        slab = path / "slabs" / f"{first // _SLAB_SLOTS + 1:010x}-{_SLOT_BYTES}.slab"
        slab.touch(0o600)
        os.truncate(slab, min(_SLAB_SLOTS, blocks - first) * _SLOT_BYTES)
    index = SlabIndex(path / "index", FileOps())
    with _harness.progress("records", blocks // 10_000) as step:
        for changes in _batches(blocks, 10_000):
            index.apply(changes)
            step()
    index.close()


def reopen(path: Path, blocks: int) -> dict[str, Any]:
    """Time to open and load the store, and what stays in memory; in a process that did nothing else before."""
    before = _resident_bytes()
    begin = time.perf_counter()
    store = SlabStore.open(path, blocks * _SLOT_BYTES)
    records = store.load()
    elapsed = time.perf_counter() - begin
    if len(records) != blocks:
        raise _harness.BenchmarkError(f"{len(records)} of {blocks} records came back")
    del records
    after = _resident_bytes()
    store.close()
    return {"store_reopen_s": round(elapsed, 3), "store_bytes_per_block": round((after - before) / blocks, 1)}


def _batches(blocks: int, size: int) -> Iterator[list[tuple[bytes, bytes]]]:
    rng = random.Random(0)
    parent = b""
    for start in range(0, blocks, size):
        changes = []
        for number in range(start, min(start + size, blocks)):
            depth = number % 500
            key = rng.randbytes(16)
            slot = number // _SLAB_SLOTS + 1 << INDEX_BITS | number % _SLAB_SLOTS
            block = NewBlock(_NAMESPACE, key, parent if depth else b"", rng.randbytes(4 * _TOKENS), depth, [])
            changes.append((index_key(_NAMESPACE, key), encode_record(block, [DiskPart(slot, _SLOT_BYTES, number)])))
            parent = key
        yield sorted(changes)


def _block(number: int, parts: Sequence[Span]) -> NewBlock:
    return NewBlock(_NAMESPACE, number.to_bytes(16, "big"), b"", bytes(4 * _TOKENS), 0, parts)


@contextmanager
def _timed(times: dict[str, list[float]], name: str, counts: bool) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    if counts:
        times.setdefault(name, []).append(time.perf_counter() - begin)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
