"""Scattered pages of a GPU, gathered and scattered in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from prefixd_swap.copies import page_copies, pinning
from prefixd_swap.copies.copy_engine import CudaCopyEngine
from prefixd_swap.copies.page_copies import NO_BLOCK, PackedPages, PageCopies, PageRun
from prefixd_swap.copies.pinning import HostPin
from prefixd_swap.errors import DeviceError, MemoryMisuseError, OutOfMemoryError
from prefixd_swap.spans import Span
from prefixd_swap.vmem import VirtualMemory, VirtualRange
from prefixd_swap.vmem.cuda_driver import open_device

PAGES = 64
PAGE_BYTES = (24 << 10, 8 << 10, 100)  # of three layers; the last is no multiple of a kernel's widest element
STRIDE = 24 << 10
BLOCKS = 3  # a part
PART_BYTES = BLOCKS * sum(PAGE_BYTES)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True),
]


class Engine:
    """An engine's KV cache: a region a layer."""

    def __init__(self, memory: VirtualMemory) -> None:
        chunk = memory.chunk_bytes
        region = -(-PAGES * STRIDE // chunk) * chunk
        self.mapped: VirtualRange = memory.reserve(len(PAGE_BYTES) * region)
        self.mapped.map(0, memory.create(self.mapped.nbytes // chunk))
        self.runs = tuple(
            PageRun(self.mapped.base + layer * region, STRIDE, nbytes) for layer, nbytes in enumerate(PAGE_BYTES)
        )
        self.copies = CudaCopyEngine(0, threads=1)

    def write(self, values: np.ndarray[Any, Any]) -> None:
        asyncio.run(self.copies.copy([(self.mapped.span(0, self.mapped.nbytes), _span(values))]))

    def read(self) -> np.ndarray[Any, Any]:
        values = np.empty(self.mapped.nbytes, np.uint8)
        asyncio.run(self.copies.copy([(_span(values), self.mapped.span(0, self.mapped.nbytes))]))
        return values

    def pairs(self, packed: PackedPages) -> list[tuple[Span, Span]]:
        """(on the device, on the host), page by page."""
        made = []
        for ids, address in zip(packed.ids.tolist(), packed.addresses.tolist(), strict=True):
            at = address
            for run in packed.runs:
                for block in ids:
                    if block != NO_BLOCK:
                        page = Span(run.address + block * run.stride, run.nbytes, True)
                        made.append((page, Span(at, run.nbytes)))
                    at += run.nbytes
        return made


def _span(values: np.ndarray[Any, Any]) -> Span:
    return Span(values.ctypes.data, values.nbytes)


@pytest.fixture
def engine(memory: VirtualMemory) -> Iterator[Engine]:
    made = Engine(memory)
    made.write(np.random.default_rng(0).integers(0, 256, made.mapped.nbytes, np.uint8))
    yield made
    made.copies.close()


@pytest.fixture
def copies(memory: VirtualMemory, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageCopies]:
    """With buffers of one chunk, so that a batch has 21 parts and the last one fewer."""
    monkeypatch.setattr(page_copies, "_STAGING_BYTES", memory.chunk_bytes)
    made = PageCopies(0)
    yield made
    made.close()


def packed_at(arena: np.ndarray[Any, Any], engine: Engine, parts: int, seed: int) -> PackedPages:
    """Parts of random blocks, at places of the arena some of which follow each other."""
    random = np.random.default_rng(seed)
    ids = random.permutation(PAGES)[: parts * BLOCKS].reshape(parts, BLOCKS)
    places = np.sort(random.permutation(len(arena) // PART_BYTES)[:parts])
    return PackedPages(engine.runs, ids, arena.ctypes.data + places * PART_BYTES)


@pytest.mark.parametrize("parts", [1, 20, 21])
def test_both_ways_give_what_single_copies_give(engine: Engine, copies: PageCopies, parts: int) -> None:
    before = engine.read()
    arenas = np.zeros((2, 24 * PART_BYTES), np.uint8)
    batched, single = (packed_at(arena, engine, parts, parts) for arena in arenas)
    asyncio.run(copies.gather(batched))
    asyncio.run(engine.copies.copy([(host, page) for page, host in engine.pairs(single)]))
    assert np.array_equal(arenas[0], arenas[1]) and arenas.any()
    arenas[:] = np.random.default_rng(9).integers(0, 256, arenas.shape[1], np.uint8)
    asyncio.run(copies.scatter(batched))
    after = engine.read()
    engine.write(before)
    asyncio.run(engine.copies.copy(engine.pairs(single)))
    assert np.array_equal(after, engine.read()) and not np.array_equal(after, before)


def test_more_parts_than_the_buffer_holds_go_batch_by_batch(
    engine: Engine, copies: PageCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch of 4 parts reuses the buffer of the last one, and the fifth has one."""
    arenas = np.zeros((2, 24 * PART_BYTES), np.uint8)
    batched, single = (packed_at(arena, engine, 17, 3) for arena in arenas)

    def in_batches_of_four(copy: Callable[[PackedPages], Coroutine[Any, Any, None]]) -> None:
        with monkeypatch.context() as patched:
            for way in copies._ways:
                patched.setattr(way._staging, "nbytes", 4 * PART_BYTES + 99)
            asyncio.run(copy(batched))

    in_batches_of_four(copies.gather)
    asyncio.run(engine.copies.copy([(host, page) for page, host in engine.pairs(single)]))
    assert np.array_equal(arenas[0], arenas[1])
    engine.write(np.zeros(engine.mapped.nbytes, np.uint8))
    in_batches_of_four(copies.scatter)
    arenas[1] = 0
    asyncio.run(engine.copies.copy([(host, page) for page, host in engine.pairs(single)]))
    assert np.array_equal(arenas[0], arenas[1])


def test_places_without_a_block_are_left_out_of_a_load_and_refused_in_a_save(
    engine: Engine, copies: PageCopies
) -> None:
    before = engine.read()
    arena = np.random.default_rng(1).integers(0, 256, 4 * PART_BYTES, np.uint8)
    ids = np.array([[5, NO_BLOCK, 9], [NO_BLOCK, NO_BLOCK, NO_BLOCK], [1, 2, NO_BLOCK]])
    packed = PackedPages(engine.runs, ids, arena.ctypes.data + np.arange(3) * PART_BYTES)
    assert packed.nbytes == 4 * sum(PAGE_BYTES)
    asyncio.run(copies.scatter(packed))
    after = engine.read()
    engine.write(before)
    asyncio.run(engine.copies.copy(engine.pairs(packed)))
    assert np.array_equal(after, engine.read())
    with pytest.raises(MemoryMisuseError, match="every place"):
        asyncio.run(copies.gather(packed))
    asyncio.run(copies.scatter(PackedPages(engine.runs, ids[1:2], packed.addresses[1:2])))


def test_an_arena_that_is_registered_in_slices_is_cut_there(
    engine: Engine, copies: PageCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of a page, so that every part lies in several: the driver refuses a copy over a border."""
    monkeypatch.setattr(pinning, "_SLICE_BYTES", 12 << 10)
    arenas = np.zeros((2, 24 * PART_BYTES), np.uint8)
    batched, single = (packed_at(arena, engine, 20, 5) for arena in arenas)
    asyncio.run(engine.copies.copy([(host, page) for page, host in engine.pairs(single)]))
    pin = HostPin(arenas[0].ctypes.data, arenas[0].nbytes, 0, pytest.fail)
    asyncio.run(copies.gather(batched))
    pin.close()
    assert np.array_equal(arenas[0], arenas[1])


def test_a_part_that_fits_no_buffer_is_refused_and_a_buffer_is_made_for_the_longest(engine: Engine) -> None:
    wide = [PageRun(engine.runs[0].address, 0, 1 << 20)]
    packed = PackedPages(wide, np.arange(100).reshape(1, 100), np.zeros(1, np.int64))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(page_copies, "_STAGING_BYTES", 1)
        small = PageCopies(0, 3 << 20)
        assert [way._staging.nbytes for way in small._ways] == [4 << 20] * 2
    with pytest.raises(MemoryMisuseError, match="over the"):
        asyncio.run(small.gather(packed))
    small.close()
    small.close()


def test_a_gpu_without_room_for_the_buffers_says_so_and_keeps_nothing(memory: VirtualMemory) -> None:
    free = open_device(0).call("cuMemGetInfo")[0]
    with pytest.raises(OutOfMemoryError):
        PageCopies(0, 1 << 50)
    assert open_device(0).call("cuMemGetInfo")[0] == free


def test_an_error_leaves_the_memory_alone_and_the_next_copy_works(
    engine: Engine, copies: PageCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = open_device(0)
    arena = np.zeros(24 * PART_BYTES, np.uint8)
    packed = packed_at(arena, engine, 8, 2)
    call = cuda.call

    def fail(name: str, *arguments: Any) -> Any:
        if name == "cuEventRecord":
            raise DeviceError("the driver says no")
        return call(name, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(cuda, "call", fail)
        with pytest.raises(DeviceError, match="says no"):
            asyncio.run(copies.gather(packed))
        seen = arena.copy()
    assert seen.any()
    asyncio.run(copies.gather(packed))
    assert np.array_equal(seen, arena), "every copy had ended when it raised"
