"""The disk tier's store against plain files: throughput in the same run, and what a million records cost."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash

from benchmarks.common import harness
from prefixd.cache import BlockChain, NamespaceSpec, PartSpec
from prefixd.cache.namespaces import namespace_id
from prefixd_swap import BlockRecord, DiskPart, NewBlock, SlabStore, Span
from prefixd_swap.slab.block_record import encode_record, index_key
from prefixd_swap.slab.file import INDEX_BITS
from prefixd_swap.slab.file_ops import FileOps
from prefixd_swap.slab.index import SlabIndex
from prefixd_swap.slab.io import DiskIo

SLOT_BYTES = 4096
TOKENS = 16
CHAIN = 500  # blocks of a prompt
_SLAB_SLOTS = 16384
SPEC = NamespaceSpec("benchmark-disk-large", TOKENS, (PartSpec("full", 0, SLOT_BYTES),))
_NAMESPACE = namespace_id(SPEC)


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

    def must_equal(self, other: Memory) -> None:
        """Raises BenchmarkError when the bytes differ."""
        if not np.array_equal(self.bytes, other.bytes):
            raise harness.BenchmarkError("the bytes loaded are not the bytes stored")

    def span(self, block: int) -> Span:
        """A block's bytes as the store takes them."""
        return Span(int(self.bytes.ctypes.data) + block * self.block_bytes, self.block_bytes)


class Way(Protocol):
    """A way to store blocks and to load them."""

    def clear(self) -> None:
        """Remove all blocks, where that has to be done before storing them again."""

    def store(self, source: Memory, batch: int) -> None:
        """Store all blocks, durably after each batch."""

    def load(self, target: Memory) -> None:
        """Load all blocks."""

    def verify(self, source: Memory, target: Memory) -> None:
        """Raises BenchmarkError unless what was just loaded is what was stored."""

    def forget(self) -> None:
        """Drop them from the page cache."""

    def close(self) -> None:
        """Let go of files and processes."""


class PlainFile:
    """A preallocated file that `depth` threads write and read, a block a call."""

    def __init__(self, path: Path, blocks: int, block_bytes: int, pool: ThreadPoolExecutor, direct: bool) -> None:
        self._blocks, self._block_bytes, self._pool = blocks, block_bytes, pool
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o600)
        os.posix_fallocate(self._fd, 0, blocks * block_bytes)
        os.fsync(self._fd)

    def clear(self) -> None:
        """They are written over."""

    def store(self, source: Memory, batch: int) -> None:
        """Write all blocks, durably after each batch."""
        for start in range(0, self._blocks, batch):
            numbers = range(start, min(start + batch, self._blocks))
            list(self._pool.map(lambda number: self._all(os.pwritev, source, number), numbers))
            os.fdatasync(self._fd)

    def load(self, target: Memory) -> None:
        """Read all blocks."""
        list(self._pool.map(lambda number: self._all(os.preadv, target, number), range(self._blocks)))

    def verify(self, source: Memory, target: Memory) -> None:
        """Compare."""
        target.must_equal(source)

    def forget(self) -> None:
        """Drop it from the page cache."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _all(self, call: Callable[[int, list[memoryview], int], int], memory: Memory, number: int) -> None:
        if call(self._fd, [memory.view(number)], number * self._block_bytes) != self._block_bytes:
            raise harness.BenchmarkError("a plain read or write came back short")


class Store:
    """A `SlabStore` that is written a batch a call, as the daemon does, and read by `depth` threads."""

    def __init__(
        self, path: Path, blocks: int, block_bytes: int, pool: ThreadPoolExecutor, depth: int, io: DiskIo
    ) -> None:
        self._blocks, self._pool, self._path = blocks, pool, path
        capacity = 2 * blocks * block_bytes
        self.store_itself = SlabStore.open(path, capacity, io=io, io_threads=depth)
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
            raise harness.BenchmarkError(f"the store took {len(self._records)} of {self._blocks} blocks")

    def load(self, target: Memory) -> None:
        """Read all blocks, verified."""

        def read(number: int, record: BlockRecord) -> None:
            for part in record.parts:
                if part is not None:
                    self.store_itself.read(part, target.span(number))

        list(self._pool.map(read, range(self._blocks), self._records))

    def verify(self, source: Memory, target: Memory) -> None:
        """Compare."""
        target.must_equal(source)

    def forget(self) -> None:
        """Drop its slabs from the page cache."""
        for slab in (self._path / "slabs").iterdir():
            fd = os.open(slab, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def close(self) -> None:
        """Close the store."""
        self.store_itself.close()


def throughput(
    ways: Mapping[str, Callable[[ThreadPoolExecutor], Way]],
    block_bytes: int,
    blocks: int,
    batch: int,
    depth: int,
    rounds: int,
) -> dict[str, float]:
    """Medians over rounds in which every way takes its turn, after one that is not counted; in GB/s."""
    source, target = Memory(blocks, block_bytes), Memory(blocks, block_bytes)
    source.bytes[:] = np.random.default_rng(0).integers(0, 256, len(source.bytes), np.uint8)
    target.bytes[:] = 1
    times: dict[str, list[float]] = {}
    with ThreadPoolExecutor(depth) as pool, ExitStack() as undo:
        made = {}
        for name, make in ways.items():
            made[name] = make(pool)
            undo.callback(made[name].close)
        with harness.progress("rounds", rounds + 1) as step:
            for turn in range(rounds + 1):
                for name, way in made.items():
                    way.clear()
                    with _timed(times, f"{name}_store", turn > 0):
                        way.store(source, batch)
                    way.forget()
                    target.bytes[:] = 1
                    with _timed(times, f"{name}_load", turn > 0):
                        way.load(target)
                    way.verify(source, target)
                    way.forget()
                step()
    return {name: blocks * block_bytes / float(np.median(taken)) / 1e9 for name, taken in times.items()}


def prompt(chain: int) -> bytes:
    """The token ids of a prompt of `fill`."""
    return random.Random(chain).randbytes(4 * TOKENS * CHAIN)


def fill(path: Path, blocks: int) -> None:
    """A store of `blocks` blocks of one 4 KiB slot in chains of 500, with a real index and slabs that are holes."""
    capacity = blocks * SLOT_BYTES
    SlabStore.open(path, capacity).close()
    for first in range(0, blocks, _SLAB_SLOTS):
        slab = path / "slabs" / f"{first // _SLAB_SLOTS + 1:010x}-{SLOT_BYTES}.slab"
        slab.touch(0o600)
        os.truncate(slab, min(_SLAB_SLOTS, blocks - first) * SLOT_BYTES)
    index = SlabIndex(path / "index", FileOps())
    with harness.progress("records", blocks // 10_000) as step:
        for changes in _batches(blocks, 10_000):
            index.apply(changes)
            step()
    index.put_namespace(_NAMESPACE, msgspec.msgpack.encode(SPEC))
    index.close()


def reopen(path: Path, blocks: int) -> dict[str, Any]:
    """Time to open and load the store, and what stays in memory; in a process that did nothing else before."""
    before = _resident_bytes()
    begin = time.perf_counter()
    store = SlabStore.open(path, blocks * SLOT_BYTES)
    records = store.load()
    elapsed = time.perf_counter() - begin
    if len(records) != blocks:
        raise harness.BenchmarkError(f"{len(records)} of {blocks} records came back")
    del records
    after = _resident_bytes()
    store.close()
    return {"store_reopen_s": round(elapsed, 3), "store_bytes_per_block": round((after - before) / blocks, 1)}


def _batches(blocks: int, size: int) -> Iterator[list[tuple[bytes, bytes]]]:
    checksum = xxhash.xxh3_64_intdigest(bytes(SLOT_BYTES))  # of a hole
    seed = int.from_bytes(_NAMESPACE, "little")
    for start in range(0, blocks, size):
        changes = []
        for number in range(start, min(start + size, blocks)):
            chain, depth = divmod(number, CHAIN)
            if number == start or not depth:
                keys = BlockChain(prompt(chain), TOKENS, seed)
            slot = number // _SLAB_SLOTS + 1 << INDEX_BITS | number % _SLAB_SLOTS
            parent = keys.key(depth - 1) if depth else b""
            block = NewBlock(_NAMESPACE, keys.key(depth), parent, keys.block(depth), depth, [])
            record = encode_record(block, [DiskPart(slot, SLOT_BYTES, checksum)])
            changes.append((index_key(_NAMESPACE, block.key), record))
        yield sorted(changes)


def _block(number: int, parts: Sequence[Span]) -> NewBlock:
    return NewBlock(_NAMESPACE, number.to_bytes(16, "big"), b"", bytes(4 * TOKENS), 0, parts)


@contextmanager
def _timed(times: dict[str, list[float]], name: str, counts: bool) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    if counts:
        times.setdefault(name, []).append(time.perf_counter() - begin)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
