"""The disk tier's store against plain files: throughput in the same run, and what a million records cost."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash

from benchmarks.common import harness
from benchmarks.common.process_footprint import status_bytes
from prefixd.cache import BlockChain, NamespaceSpec, PartSpec
from prefixd.cache.namespaces import namespace_digest
from prefixd_swap import BlockRecord, DiskPart, NewBlock, SlabStore, Span
from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.files.io import DiskIo
from prefixd_swap.slab.files.slab_file import INDEX_BITS
from prefixd_swap.slab.index.block_record import encode_record, index_key
from prefixd_swap.slab.index.index import SlabIndex
from prefixd_swap.tiers.store_tier import READ_PIECE_BYTES
from prefixd_swap.transfers import piece_items

SLOT_BYTES = 4096
TOKENS = 16
CHAIN = 500  # blocks of a prompt
_SLAB_SLOTS = 16384
_LEAST_CAPACITY = 1 << 30  # with slabs of 64 MiB; a smaller tier has smaller ones, and syncs more files a batch
_HOLE = xxhash.xxh3_64_intdigest(bytes(SLOT_BYTES))
_CHILL_S = 1.0
_CHILL_AGAIN_S = 0.01
_libc = ctypes.CDLL(None)
SPEC = NamespaceSpec("benchmark-disk-large", TOKENS, (PartSpec("full", 0, SLOT_BYTES),))
_NAMESPACE = namespace_digest(SPEC)


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
        return memoryview(self._map)[block * self.block_bytes : (block + 1) * self.block_bytes]

    @cached_property
    def checksums(self) -> Sequence[int]:
        """xxh3_64 of each block; the bytes may not change afterwards."""
        return [xxhash.xxh3_64_intdigest(self.view(block)) for block in range(len(self.bytes) // self.block_bytes)]

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

    def load(self, target: Memory, order: Sequence[int]) -> None:
        """Load all blocks, in this order."""

    def verify(self, source: Memory, target: Memory) -> None:
        """Raises BenchmarkError unless what was just loaded is what was stored."""

    def files(self) -> Iterable[Path]:
        """The files that hold the blocks, durable after `store`."""

    def close(self) -> None:
        """Let go of files and processes."""


class PlainFile:
    """A preallocated file that `depth` threads write and read, a block a call."""

    def __init__(self, path: Path, blocks: int, block_bytes: int, pool: ThreadPoolExecutor, direct: bool) -> None:
        self._blocks, self._block_bytes, self._pool = blocks, block_bytes, pool
        self._path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o600)
        os.posix_fallocate(fd, 0, blocks * block_bytes)
        os.fsync(fd)
        self._fds = {path: fd}

    def clear(self) -> None:
        """They are written over."""

    def store(self, source: Memory, batch: int) -> None:
        for start in range(0, self._blocks, batch):
            numbers = range(start, min(start + batch, self._blocks))
            places = [self._place(number) for number in numbers]
            list(self._pool.map(partial(self._all, os.pwritev, source), numbers, places))
            for fd in {fd for fd, _ in places}:
                os.fdatasync(fd)

    def load(self, target: Memory, order: Sequence[int]) -> None:
        list(self._pool.map(partial(self._all, os.preadv, target), order, map(self._place, order)))

    def verify(self, source: Memory, target: Memory) -> None:
        target.must_equal(source)

    def files(self) -> Iterable[Path]:
        return list(self._fds)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def _place(self, number: int) -> tuple[int, int]:
        """The descriptor and the offset of a block."""
        return self._fds[self._path], number * self._block_bytes

    def _all(
        self,
        call: Callable[[int, list[memoryview], int], int],
        memory: Memory,
        number: int,
        place: tuple[int, int],
    ) -> None:
        if call(place[0], [memory.view(number)], place[1]) != self._block_bytes:
            raise harness.BenchmarkError("a plain read or write came back short")


class SamePlaces(PlainFile):
    """Plain direct calls on the bytes of the files in which a store had its blocks last: the second of two equal files
    may be a tenth faster or slower, at least on a virtual disk."""

    def __init__(self, store: Store, block_bytes: int, pool: ThreadPoolExecutor) -> None:
        self._store, self._blocks, self._block_bytes, self._pool = store, len(store), block_bytes, pool
        self._fds = {}

    def _place(self, number: int) -> tuple[int, int]:
        path, offset = self._store.places[number]
        if path not in self._fds:
            self._fds[path] = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        return self._fds[path], offset


class FewReads(FileOps):
    """The real calls, of which at most `depth` read a slab at a time."""

    def __init__(self, depth: int) -> None:
        self._free = threading.Semaphore(depth)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._free:
            return super().pread(fd, buffer, offset)

    def copy_mapped(self, address: int, buffer: memoryview) -> int:
        with self._free:
            return super().copy_mapped(address, buffer)


class Store:
    """A `SlabStore` with one prompt, written a batch a call and read in pieces, as the daemon does. As there, checksums
    are known when blocks are written (they are those of the commit), and compared when they are read.

    It has slabs of the size that it has in a tier of any usual size. As in the daemon, half as many threads again as
    there are calls at a time take pieces of a load: some verify while the others read.

    Args:
        path: its directory.
        blocks: blocks of the prompt.
        block_bytes: bytes of a block.
        depth: calls at a time.
        io: its `disk.io`.
        ops: its file calls; by default `FewReads`.
        more_paths: its further directories.
    """

    def __init__(
        self,
        path: Path,
        blocks: int,
        block_bytes: int,
        depth: int,
        io: DiskIo,
        ops: FileOps | None = None,
        more_paths: Sequence[Path] = (),
    ) -> None:
        self._blocks, self._depth = blocks, depth
        self._pool = ThreadPoolExecutor(depth + depth // 2)
        capacity, ops = max(2 * blocks * block_bytes, _LEAST_CAPACITY), ops or FewReads(depth)
        self._folders = [folder / "slabs" for folder in (path, *more_paths)]
        self.store_itself = SlabStore.open(path, capacity, io=io, io_threads=depth, ops=ops, more_paths=more_paths)
        self._records: list[BlockRecord] = []
        self.places: list[tuple[Path, int]] = []
        """The file and the offset of each block that was stored last."""

    def __len__(self) -> int:
        return self._blocks

    def clear(self) -> None:
        self.store_itself.remove([(record.namespace, record.key) for record in reversed(self._records)])
        self._records = []

    def store(self, source: Memory, batch: int) -> None:
        for start in range(0, self._blocks, batch):
            numbers = range(start, min(start + batch, self._blocks))
            last = self._records[-1] if self._records else None
            records = self.store_itself.write([_block(number, source, last) for number in numbers])
            self._records += [record for record in records if record is not None]
        if len(self._records) != self._blocks:
            raise harness.BenchmarkError(f"the store took {len(self._records)} of {self._blocks} blocks")
        slots = [part.slot for record in self._records for part in record.parts if part is not None]
        slabs = {int(path.stem, 16): path for path in self.files()}
        self.places = [(slabs[slot >> INDEX_BITS], (slot & (1 << INDEX_BITS) - 1) * SLOT_BYTES) for slot in slots]

    def load(self, target: Memory, order: Sequence[int]) -> None:
        nbytes = target.block_bytes
        step = piece_items(nbytes, self._blocks, at_least=self._depth, most_bytes=READ_PIECE_BYTES)

        def read(start: int) -> None:
            some = order[start : start + step]
            parts = [self._records[number].parts[0] for number in some]
            there = [part for part in parts if part is not None]
            addresses = [target.span(number).address for number in some]
            self.store_itself.read_all(there, addresses, nbytes)

        list(self._pool.map(read, range(0, self._blocks, step)))

    def verify(self, source: Memory, target: Memory) -> None:
        target.must_equal(source)

    def files(self) -> Iterable[Path]:
        return [slab for folder in self._folders for slab in folder.iterdir()]

    def close(self) -> None:
        self._pool.shutdown()
        self.store_itself.close()


def throughput(
    ways: Mapping[str, Callable[[ThreadPoolExecutor], Way]],
    block_bytes: int,
    blocks: int,
    batch: int,
    depth: int,
    rounds: int,
    scattered: bool = False,
) -> dict[str, dict[str, float]]:
    """Medians over rounds in which every way takes its turn, after one round that is not counted.

    A round begins with another way than the last. Before each load the files are dropped from the page cache, and it is
    made sure that nothing of them is there (`chill`).

    Args:
        ways: makes each way, given the threads that it may use.
        block_bytes: bytes of a block.
        blocks: blocks a round.
        batch: blocks of a durable batch.
        depth: calls at a time.
        rounds: rounds that count.
        scattered: also load the blocks in random order.

    Returns:
        By way: `store_gbps`, `load_gbps` (in the order of storing), `scattered_load_gbps`, and of each the CPU time of
        this process, all threads, that a gigabyte took (`store_cpu_s_per_gb` and so on).
    """
    source, target = Memory(blocks, block_bytes), Memory(blocks, block_bytes)
    source.bytes[:] = np.random.default_rng(0).integers(0, 256, len(source.bytes), np.uint8)
    target.bytes[:] = 1
    orders: dict[str, Sequence[int]] = {"load": range(blocks)}
    if scattered:
        orders["scattered_load"] = np.random.default_rng(1).permutation(blocks).tolist()
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}  # of the clock, of the CPU
    with ThreadPoolExecutor(depth) as pool, ExitStack() as undo:
        made = {}
        for name, make in ways.items():
            made[name] = make(pool)
            undo.callback(made[name].close)
        names = list(made)
        with harness.progress("rounds", rounds + 1) as step:
            for turn in range(rounds + 1):
                first = turn % len(names)
                for name in names[first:] + names[:first]:
                    way = made[name]
                    way.clear()
                    with _timed(seconds, (name, "store"), turn > 0):
                        way.store(source, batch)
                    for what, order in orders.items():
                        chill(way.files())
                        target.bytes[:] = 1
                        with _timed(seconds, (name, what), turn > 0):
                            way.load(target, order)
                        way.verify(source, target)
                    chill(way.files())
                step()
    gigabytes = blocks * block_bytes / 1e9
    figures: dict[str, dict[str, float]] = {name: {} for name in names}
    for (name, what), taken in seconds.items():
        clock, cpu = np.median(np.array(taken), axis=0).tolist()
        figures[name] |= {f"{what}_gbps": gigabytes / clock, f"{what}_cpu_s_per_gb": cpu / gigabytes}
    return figures


def chill(files: Iterable[Path]) -> None:
    """Drops files, whose writes are durable, from the page cache (`posix_fadvise`, DONTNEED).

    A few pages stay while a core has yet to enter them into the kernel's lists; they are dropped a moment later.

    Raises BenchmarkError: some of a file is still there after a second.
    """
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            deadline = time.monotonic() + _CHILL_S
            while True:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                if not (left := _cached_bytes(fd)):
                    break
                if time.monotonic() > deadline:
                    raise harness.BenchmarkError(f"{left} bytes of {file} stay in the page cache, so no load is cold")
                time.sleep(_CHILL_AGAIN_S)
        finally:
            os.close(fd)


def _cached_bytes(fd: int) -> int:
    """Of a file in the page cache."""
    size = os.fstat(fd).st_size
    with mmap.mmap(fd, size, mmap.MAP_PRIVATE) as view:  # private, so that ctypes may have its address
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.byref(ctypes.c_char.from_buffer(view))
        if _libc.mincore(start, ctypes.c_size_t(size), pages):
            raise harness.BenchmarkError("the system does not tell what is in the page cache (mincore)")
        del start
        return mmap.PAGESIZE * sum(page & 1 for page in bytes(pages))


@dataclass(frozen=True, slots=True)
class Prompts:
    """How `fill` divides blocks: a prompt of each length in `first`, then prompts of `chain` blocks."""

    chain: int = CHAIN
    first: tuple[int, ...] = ()

    def tokens(self, number: int) -> bytes:
        return random.Random(number).randbytes(4 * TOKENS * self._blocks(number))

    def start(self, number: int) -> int:
        """The number of a prompt's first block among all blocks."""
        return sum(self.first[:number]) + self.chain * max(0, number - len(self.first))

    def locate(self, block: int) -> tuple[int, int]:
        """The prompt of a block, and the block's place in the prompt."""
        for number, blocks in enumerate(self.first):
            if block < blocks:
                return number, block
            block -= blocks
        number, depth = divmod(block, self.chain)
        return len(self.first) + number, depth

    def _blocks(self, number: int) -> int:
        return self.first[number] if number < len(self.first) else self.chain


def prompt(chain: int) -> bytes:
    """The token ids of a prompt of `fill`."""
    return Prompts().tokens(chain)


def place(path: Path, block: int) -> tuple[Path, int]:
    """The slab file, and the offset in it, of one of the blocks that `fill` has stored."""
    number, slot = divmod(block, _SLAB_SLOTS)
    return _slab(path, number), slot * SLOT_BYTES


def fill(path: Path, blocks: int, prompts: Prompts = Prompts(), *, coded: bool = False) -> None:
    """A store of `blocks` blocks with a real index and slabs that are holes.

    Each block has one 4 KiB slot; if it is `coded`, one to three in mixed pages.
    """
    slots = 3 * blocks if coded else blocks  # more than the coded ones take
    SlabStore.open(path, slots * SLOT_BYTES).close()
    for first in range(0, slots, _SLAB_SLOTS):
        slab = _slab(path, first // _SLAB_SLOTS)
        slab.touch(0o600)
        os.truncate(slab, min(_SLAB_SLOTS, slots - first) * SLOT_BYTES)
    index = SlabIndex(path / "index", FileOps())
    with harness.progress("records", blocks // 10_000) as step:
        for changes in _batches(blocks, 10_000, prompts, _coded_part if coded else _raw_part):
            index.apply(changes)
            step()
    index.put_namespaces({_NAMESPACE: msgspec.msgpack.encode(SPEC)})
    index.close()


def reopen(path: Path, blocks: int) -> dict[str, Any]:
    """Time to open and load the store, and what stays in memory; in a process that did nothing else before."""
    before = status_bytes("self")["VmRSS"]
    begin = time.perf_counter()
    store = SlabStore.open(path, blocks * SLOT_BYTES)
    records = store.load()
    elapsed = time.perf_counter() - begin
    if len(records) != blocks:
        raise harness.BenchmarkError(f"{len(records)} of {blocks} records came back")
    del records
    after = status_bytes("self")["VmRSS"]
    store.close()
    return {"store_reopen_s": round(elapsed, 3), "store_bytes_per_block": round((after - before) / blocks, 1)}


def _slab(path: Path, number: int) -> Path:
    return path / "slabs" / f"{number + 1:010x}.slab"


def _raw_part(number: int) -> DiskPart:
    slot = number // _SLAB_SLOTS + 1 << INDEX_BITS | number % _SLAB_SLOTS
    return DiskPart(slot, SLOT_BYTES, _HOLE)


def _coded_part(number: int) -> DiskPart:
    """One, two and three slots in turns, one behind the other."""
    three, turn = divmod(number, 3)
    slab, place = divmod(three, _SLAB_SLOTS // 6)
    slot = slab + 1 << INDEX_BITS | 6 * place + (0, 1, 3)[turn]
    return DiskPart(slot, SLOT_BYTES * (1 + turn) - number % 1000, _HOLE, coded=True)


def _batches(
    blocks: int, size: int, prompts: Prompts, part: Callable[[int], DiskPart]
) -> Iterator[list[tuple[bytes, bytes]]]:
    seed = int.from_bytes(_NAMESPACE, "little")
    for start in range(0, blocks, size):
        changes = []
        for number in range(start, min(start + size, blocks)):
            chain, depth = prompts.locate(number)
            if not depth:
                keys = BlockChain(prompts.tokens(chain), TOKENS, seed)
            parent = keys.key(depth - 1) if depth else b""
            block = NewBlock(_NAMESPACE, keys.key(depth), parent, keys.block(depth), depth, [])
            changes.append((index_key(_NAMESPACE, block.key), encode_record(block, [part(number)])))
        yield sorted(changes)


def _block(number: int, source: Memory, last: BlockRecord | None) -> NewBlock:
    """Block `number` of the prompt, whose last stored block is `last`."""
    parent = (number - 1).to_bytes(16, "big") if number else b""
    near = [None if part is None else part.slot for part in last.parts] if last and last.key == parent else None
    key, tokens, parts = number.to_bytes(16, "big"), bytes(4 * TOKENS), [source.span(number)]
    return NewBlock(_NAMESPACE, key, parent, tokens, number, parts, [source.checksums[number]], near)


@contextmanager
def _timed(
    seconds: dict[tuple[str, str], list[tuple[float, float]]], name: tuple[str, str], counts: bool
) -> Iterator[None]:
    begin, cpu = time.perf_counter(), time.process_time()
    yield
    if counts:
        seconds.setdefault(name, []).append((time.perf_counter() - begin, time.process_time() - cpu))
