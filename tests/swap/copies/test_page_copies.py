"""Scattered pages of a GPU, gathered and scattered in batches."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixd_swap.copies import page_copies, pinning
from prefixd_swap.copies.copy_engine import CudaCopyEngine, StreamMark
from prefixd_swap.copies.page_copies import PageCopies
from prefixd_swap.copies.page_kernel import PageKernel
from prefixd_swap.copies.page_runs import NO_BLOCK, PackedPages, PageRun
from prefixd_swap.copies.pinning import HostPin
from prefixd_swap.errors import DeviceError, MemoryMisuseError, OutOfMemoryError
from prefixd_swap.spans import Span
from prefixd_swap.vmem import VirtualMemory, VirtualRange
from prefixd_swap.vmem.backends.cuda_driver import open_device

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
    """With halves of one chunk, so that a batch has 21 parts and the last one fewer."""
    monkeypatch.setattr(page_copies, "_HALF_BYTES", memory.chunk_bytes)
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


def test_no_half_is_filled_before_it_is_empty(
    engine: Engine, copies: PageCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five batches, while the stream that empties the halves is busy with something else."""
    cuda = open_device(0)
    arenas = np.zeros((2, 24 * PART_BYTES), np.uint8)
    batched, single = (packed_at(arena, engine, 17, 3) for arena in arenas)
    scratch = np.zeros(1, np.uint8)
    for way in copies._ways:
        monkeypatch.setattr(way, "_half_bytes", 4 * PART_BYTES)

    def keep_busy(stream: Any) -> None:
        cuda.use_context()
        for _ in range(30):
            cuda.call("cuMemcpyDtoHAsync", scratch.ctypes.data, engine.mapped.base, 1, stream)

    keep_busy(copies._ways[0]._copies)
    asyncio.run(copies.gather(batched))
    asyncio.run(engine.copies.copy([(host, page) for page, host in engine.pairs(single)]))
    assert np.array_equal(arenas[0], arenas[1])
    engine.write(np.zeros(engine.mapped.nbytes, np.uint8))
    keep_busy(copies._ways[1]._kernels)
    asyncio.run(copies.scatter(batched))
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
        patched.setattr(page_copies, "_HALF_BYTES", 128 << 10)
        small = PageCopies(0, 3 << 20)
        assert [way._staging.nbytes for way in small._ways] == [(2 + 2 * 3) << 20] * 2
    with pytest.raises(MemoryMisuseError, match="over the"):
        asyncio.run(small.gather(packed))
    small.close()
    small.close()


def test_a_gpu_without_room_for_the_buffers_says_so_and_keeps_nothing(memory: VirtualMemory) -> None:
    free = open_device(0).call("cuMemGetInfo")[0]
    with pytest.raises(OutOfMemoryError):
        PageCopies(0, 1 << 50)
    assert open_device(0).call("cuMemGetInfo")[0] == free


@pytest.mark.parametrize("element", [16, 4, 1])
def test_a_kernel_that_moves_wrong_bytes_is_refused_at_the_start(
    memory: VirtualMemory, monkeypatch: pytest.MonkeyPatch, element: int
) -> None:
    """One variant of it leaves every second page out."""
    free = open_device(0).call("cuMemGetInfo")[0]
    launch = PageKernel.launch

    def wrong(self: PageKernel, stream: Any, of: int, runs: int, run_count: int, *rest: Any) -> None:
        launch(self, stream, of, runs, 1 if of == element else run_count, *rest)

    monkeypatch.setattr(PageKernel, "launch", wrong)
    with pytest.raises(DeviceError, match=f"wrong bytes on .* \\(elements of {element} bytes\\)"):
        PageCopies(0)
    assert open_device(0).call("cuMemGetInfo")[0] == free


def test_an_error_leaves_the_memory_alone_and_the_next_copy_works(
    engine: Engine, copies: PageCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = open_device(0)
    arena = np.zeros(24 * PART_BYTES, np.uint8)
    packed = packed_at(arena, engine, 8, 2)
    call = cuda.call

    def fail(name: str, *arguments: Any) -> Any:
        if name == "cuEventRecord" and arguments[0] is copies._ways[0]._events[5]:  # behind everything
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


def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the driver's calls from now on."""
    cuda = open_device(0)
    calls: Counter[str] = Counter()
    call = cuda.call
    monkeypatch.setattr(cuda, "call", lambda name, *rest: (calls.update([name]), call(name, *rest))[1])
    return calls


def test_one_launch_moves_all_layers_of_a_batch(
    engine: Engine, copies: PageCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """21 parts fit a half; neighbours on the host are one call, evenly spaced ones too."""
    calls = counted_calls(monkeypatch)
    arena = np.zeros((21, 2 * PART_BYTES), np.uint8)
    ids = np.random.default_rng(0).permutation(PAGES)[:63].reshape(21, BLOCKS)
    for apart, copied in ((PART_BYTES, "cuMemcpyDtoHAsync"), (2 * PART_BYTES, "cuMemcpy2DAsync")):
        addresses = np.random.default_rng(1).permutation(arena.ctypes.data + apart * np.arange(21))
        calls.clear()
        asyncio.run(copies.gather(PackedPages(engine.runs, ids, addresses)))
        assert (calls["cuLaunchKernel"], calls[copied], calls["cuEventSynchronize"]) == (1, 1, 1)
        assert calls["cuStreamSynchronize"] == 0, "the host waits once, at the end"
        calls.clear()
        asyncio.run(copies.scatter(PackedPages(engine.runs, ids, addresses)))
        assert (calls["cuLaunchKernel"], calls["cuStreamSynchronize"]) == (1, 0)


def test_layers_in_turn_are_there_for_what_follows_their_mark(
    engine: Engine, copies: PageCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that holds for the mark of a layer reads its pages, while later layers are still on their way. A layer
    is one strided copy and one launch."""
    cuda = open_device(0)
    cuda.use_context()
    stream = cuda.call("cuStreamCreate", 1)
    arena = np.random.default_rng(4).integers(0, 256, (20, PART_BYTES), np.uint8)
    ids = np.random.default_rng(5).permutation(PAGES)[: 20 * BLOCKS].reshape(20, BLOCKS)
    layers, at = [], 0
    for run in engine.runs:
        layers.append(PackedPages([run], ids, arena.ctypes.data + PART_BYTES * np.arange(20) + BLOCKS * at))
        at += run.nbytes
    seen = np.zeros((len(layers), engine.mapped.nbytes), np.uint8)

    def read(layer: int, mark: StreamMark) -> None:
        mark.hold(int(stream))
        cuda.call("cuMemcpyDtoHAsync", seen[layer].ctypes.data, engine.mapped.base, engine.mapped.nbytes, stream)

    asyncio.run(copies.scatter_in_turn(layers, read))
    cuda.call("cuStreamSynchronize", stream)
    after = engine.read()
    for layer, run in enumerate(engine.runs):
        first = run.address - engine.mapped.base
        region = slice(first, first + PAGES * STRIDE)
        assert np.array_equal(seen[layer][region], after[region])
    whole = PackedPages(engine.runs, ids, arena.ctypes.data + PART_BYTES * np.arange(20))
    engine.write(np.zeros(engine.mapped.nbytes, np.uint8))
    asyncio.run(engine.copies.copy(engine.pairs(whole)))
    wanted = engine.read()
    engine.write(np.zeros(engine.mapped.nbytes, np.uint8))
    calls = counted_calls(monkeypatch)
    asyncio.run(copies.scatter_in_turn(layers, lambda layer, mark: None))
    assert calls["cuMemcpy2DAsync"] == calls["cuLaunchKernel"] == len(layers) and calls["cuEventSynchronize"] == 1
    assert np.array_equal(engine.read(), wanted)
    cuda.call("cuStreamDestroy", stream)


@pytest.fixture
def both(memory: VirtualMemory, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PageCopies]]:
    """Without and with strided copies between pages and host, of rows of any length."""
    monkeypatch.setattr(page_copies, "_HALF_BYTES", 128 << 10)
    made = [PageCopies(0, 16 << 10, row_bytes=row_bytes, call_bytes=1) for row_bytes in (None, 1)]
    for each in made:
        for way in each._ways:
            way._half_bytes = 16 << 10
    yield made
    for each in made:
        each.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    blocks_outermost=st.booleans(),
    sizes=st.lists(st.sampled_from([16, 48, 4, 10, 512]), min_size=1, max_size=4),
    alike=st.booleans(),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 4)),
    ids_follow=st.booleans(),
    missing=st.sets(st.integers(0, 23), max_size=3),
    apart=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_however_pages_and_parts_lie_the_bytes_are_those_of_single_copies(
    engine: Engine,
    both: list[PageCopies],
    blocks_outermost: bool,
    sizes: list[int],
    alike: bool,
    shape: tuple[int, int],
    ids_follow: bool,
    missing: set[int],
    apart: int,
    seed: int,
) -> None:
    """Layers or blocks outermost, layers of one size or not, blocks that follow each other, places without a block;
    parts side by side, evenly spaced or anywhere."""
    random = np.random.default_rng(seed)
    sizes = [sizes[0]] * len(sizes) if alike else sizes
    whole, starts = sum(sizes), np.cumsum([0, *sizes]).tolist()
    base = engine.mapped.base
    runs = [
        PageRun(base + starts[at], whole, size) if blocks_outermost else PageRun(base + 24 * starts[at], size, size)
        for at, size in enumerate(sizes)
    ]
    parts, blocks = shape
    ids = (np.arange(24) if ids_follow else random.permutation(24))[: parts * blocks].reshape(shape)
    arena = random.integers(0, 256, 24 * blocks * whole, np.uint8)
    width = blocks * whole
    places = np.arange(parts) * (apart + 1) if apart < 2 else random.permutation(24)[:parts]
    packed = PackedPages(runs, ids, arena.ctypes.data + places * width)

    before = random.integers(0, 256, engine.mapped.nbytes, np.uint8)
    engine.write(before)
    asyncio.run(engine.copies.copy([(host, page) for page, host in engine.pairs(packed)]))
    wanted = arena.copy()
    for copies in both:
        arena[:] = random.integers(0, 256, len(arena), np.uint8)
        was = arena.copy()
        asyncio.run(copies.gather(packed))
        for part in places.tolist():
            here = slice(part * width, (part + 1) * width)
            assert np.array_equal(arena[here], wanted[here])
            was[here] = arena[here]
        assert np.array_equal(arena, was), "nothing beside the parts is written"

    ids.reshape(-1)[[place for place in missing if place < ids.size]] = NO_BLOCK
    engine.write(before)
    asyncio.run(engine.copies.copy(engine.pairs(packed)))
    loaded = engine.read()
    for copies in both:
        engine.write(before)
        asyncio.run(copies.scatter(packed))
        assert np.array_equal(engine.read(), loaded)
