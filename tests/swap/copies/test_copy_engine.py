from __future__ import annotations

import asyncio
import functools
import itertools
import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd_swap.copies.address_columns import AddressColumns
from prefixd_swap.copies.copy_engine import (
    CopyEngine,
    HostCopyEngine,
    create_copy_engine,
    register_host,
    unregister_host,
)
from prefixd_swap.errors import DeviceError, MemoryMisuseError, OutOfMemoryError
from prefixd_swap.spans import Span
from prefixd_swap.vmem import VirtualMemory, VirtualRange
from prefixd_swap.vmem.backends.cuda_driver import open_device

Bytes = npt.NDArray[np.uint8]

# Host copies have no driver that could refuse them, and pin nothing.
cuda_only = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


def span(array: Bytes) -> Span:
    return Span(array.ctypes.data, array.nbytes)


def noise(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.fixture
def engine(device: str) -> Iterator[CopyEngine]:
    created = create_copy_engine(device, threads=2)
    yield created
    created.close()


@pytest.fixture
def home(memory: VirtualMemory) -> VirtualRange:
    """Eight chunks of the tier, mapped."""
    mapped = memory.reserve(8 * memory.chunk_bytes)
    mapped.map(0, memory.create(8))
    return mapped


async def test_down_across_and_up_again(engine: CopyEngine, home: VirtualRange) -> None:
    """Into the tier, to another place in it, and out again: every direction there is."""
    size = home.memory.chunk_bytes
    source, target = noise(3 * size), np.zeros(3 * size, np.uint8)
    pieces = [slice(i * size, (i + 1) * size) for i in range(3)]
    await engine.copy([(home.span(2 * i * size, size), span(source[piece])) for i, piece in enumerate(pieces)])
    await engine.copy([(home.span((2 * i + 1) * size, size), home.span(2 * i * size, size)) for i in range(3)])
    await engine.copy([(span(target[piece]), home.span((2 * i + 1) * size, size)) for i, piece in enumerate(pieces)])
    assert np.array_equal(source, target)


async def test_directions_can_be_mixed_in_one_call(engine: CopyEngine, home: VirtualRange) -> None:
    size = home.memory.chunk_bytes
    old, new, moved = noise(size, 1), noise(size, 2), np.zeros(size, np.uint8)
    out = np.zeros(2 * size, np.uint8)
    await engine.copy([(home.span(0, size), span(old))])
    await engine.copy(
        [
            (span(out[:size]), home.span(0, size)),
            (home.span(size, size), span(new)),
            (span(moved), span(new)),
            (home.span(3 * size, size), home.span(0, size)),
        ]
    )
    assert np.array_equal(out[:size], old) and np.array_equal(moved, new)
    await engine.copy([(span(out[:size]), home.span(size, size)), (span(out[size:]), home.span(3 * size, size))])
    assert np.array_equal(out, np.concatenate([new, old]))


async def test_parts_of_chunks(engine: CopyEngine, home: VirtualRange) -> None:
    """A copy may start and end anywhere, also across the border of two chunks."""
    size = home.memory.chunk_bytes
    source, target = noise(1000), np.zeros(1000, np.uint8)
    await engine.copy([(home.span(size - 333, 1000), span(source))])
    await engine.copy([(span(target), home.span(size - 333, 1000))])
    assert np.array_equal(source, target)


async def test_the_source_may_change_as_soon_as_the_copy_has_ended(engine: CopyEngine, home: VirtualRange) -> None:
    size = home.memory.chunk_bytes
    source, target = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    for value in (1, 2, 3):
        source[:] = value
        await engine.copy([(home.span(0, size), span(source))])
        source[:] = 99
        await engine.copy([(span(target), home.span(0, size))])
        assert (target == value).all()


async def test_many_copies_at_once(engine: CopyEngine, home: VirtualRange) -> None:
    size = home.memory.chunk_bytes
    sources = [noise(size, seed) for seed in range(8)]
    targets = [np.zeros(size, np.uint8) for _ in sources]

    async def there_and_back(index: int) -> None:
        place = home.span(index * size, size)
        await engine.copy([(place, span(sources[index]))])
        await engine.copy([(span(targets[index]), place)])

    await asyncio.gather(*map(there_and_back, range(8)))
    assert all(map(np.array_equal, sources, targets))


async def test_a_cancelled_copy_has_ended_when_the_cancellation_arrives(engine: CopyEngine, home: VirtualRange) -> None:
    """Otherwise its memory could be given to somebody else while it is still being written."""
    size = home.nbytes
    source, target = noise(size), np.zeros(size, np.uint8)
    await engine.copy([(home.span(0, size), span(source))])
    copying = asyncio.create_task(engine.copy([(span(target), home.span(0, size))]))
    await asyncio.sleep(0)
    copying.cancel()
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert np.array_equal(source, target)


async def test_the_event_loop_runs_meanwhile(engine: CopyEngine, home: VirtualRange) -> None:
    source = noise(home.nbytes)
    copying = asyncio.create_task(engine.copy([(home.span(0, home.nbytes), span(source))]))
    turns = 0
    while not copying.done():
        turns += 1
        await asyncio.sleep(0)
    await copying
    assert turns > 1


async def test_nothing_to_copy(engine: CopyEngine) -> None:
    await engine.copy([])
    await engine.copy([(Span(0, 0), Span(0, 0))])


async def test_pairs_of_different_size_are_refused_before_any_is_copied(engine: CopyEngine, home: VirtualRange) -> None:
    source = noise(64)
    target = np.zeros(64, np.uint8)
    with pytest.raises(MemoryMisuseError, match="32 bytes over 64"):
        await engine.copy([(span(target), span(source)), (home.span(0, 64), span(source[:32]))])
    assert not target.any()


async def test_a_closed_engine_refuses(device: str) -> None:
    engine = create_copy_engine(device)
    engine.close()
    engine.close()
    with pytest.raises(MemoryMisuseError, match="closed"):
        await engine.copy([(span(noise(8)), span(noise(8)))])


async def test_a_copy_needs_no_new_thread(no_more_threads: Callable[[], AbstractContextManager[list[str]]]) -> None:
    """A pool that starts threads for its copies would leave those that it could hand out without anybody to wait."""
    engine = HostCopyEngine(4)
    source, target = noise(8 << 20), np.zeros(8 << 20, np.uint8)
    with no_more_threads() as refused:
        await engine.copy([(span(target), span(source))])
        with pytest.raises(OutOfMemoryError, match=r"4 threads cannot be started .*ulimit -u"):
            HostCopyEngine(4)
    assert np.array_equal(source, target) and len(refused) == 1
    engine.close()


async def test_a_host_engine_does_not_touch_device_memory() -> None:
    engine = HostCopyEngine(1)
    array = noise(8)
    with pytest.raises(MemoryMisuseError, match="device memory"):
        await engine.copy([(Span(array.ctypes.data, 8, on_device=True), span(array))])
    engine.close()


@pytest.mark.parametrize("device_name", ["tpu", "cuda:one", ""])
def test_an_unknown_device_is_refused(device_name: str) -> None:
    with pytest.raises(DeviceError, match="not supported"):
        create_copy_engine(device_name)


@pytest.fixture
def nowhere(memory: VirtualMemory, monkeypatch: pytest.MonkeyPatch) -> Span:
    """A place that no copy reaches. The driver is not asked: on some systems a wild address breaks the context."""
    place = Span(4096, 64, on_device=True)
    api = open_device(0).api

    def refuse(real: Callable[..., Any], to: int, at: int, *rest: Any) -> Any:
        refused = place.address in (to, at)
        return (api.CUresult.CUDA_ERROR_INVALID_VALUE,) if refused else real(to, at, *rest)

    for name in ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"):
        monkeypatch.setattr(api, name, functools.partial(refuse, getattr(api, name)))
    return place


@cuda_only
async def test_an_error_of_the_driver_reaches_the_caller_and_the_engine_survives(
    engine: CopyEngine, home: VirtualRange, nowhere: Span
) -> None:
    array = noise(64)
    for _ in range(3):
        with pytest.raises(DeviceError, match=r"cuMemcpyHtoDAsync failed with CUDA_ERROR"):
            await engine.copy([(home.span(0, 64), span(array)), (nowhere, span(array))])
    await engine.copy([(home.span(0, 64), span(array))])
    assert len(engine._lanes[0]._events) == 1, "an event is used again after an error"


@cuda_only
async def test_when_a_copy_is_refused_those_before_it_have_ended(
    engine: CopyEngine, home: VirtualRange, nowhere: Span
) -> None:
    """The caller may free the memory as soon as it gets the error."""
    size = home.memory.chunk_bytes
    source, target = noise(size), np.zeros(size, np.uint8)
    await engine.copy([(home.span(0, size), span(source))])
    with pytest.raises(DeviceError, match="cuMemcpyDtoHAsync"):
        await engine.copy([(span(target), home.span(0, size)), (span(noise(64)), nowhere)])
    assert np.array_equal(source, target)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3)), max_size=12),
)
def test_joining_keeps_every_byte_in_its_place(parts: list[tuple[int, int, int]]) -> None:
    """Gaps before each destination and source, and a length: joined or not, the same bytes go the same way."""
    pairs, to, at = [], 0, 100
    for gap_to, gap_at, nbytes in parts:
        to, at = to + gap_to, at + gap_at
        pairs.append((Span(to, nbytes, True), Span(at, nbytes)))
        to, at = to + nbytes, at + nbytes

    def moves(some: list[tuple[Span, Span]]) -> list[tuple[int, int]]:
        return [(d.address + i, s.address + i) for d, s in some for i in range(s.nbytes)]

    columns = AddressColumns.of(pairs)
    assert columns.pairs() == pairs
    joined = columns.joined().pairs()
    assert moves(joined) == moves(pairs)
    assert all(d.on_device and not s.on_device and s.nbytes for d, s in joined)
    for (d1, s1), (d2, s2) in itertools.pairwise(joined):
        assert d1.address + d1.nbytes != d2.address or s1.address + s1.nbytes != s2.address


async def test_columns_copy_what_pairs_copy(engine: CopyEngine, home: VirtualRange) -> None:
    """Into the tier and out again, with neighbours and an empty copy; a closed engine refuses."""
    size = 3 * home.memory.chunk_bytes // 2
    source, target = noise(size), np.zeros(size, np.uint8)
    offsets = np.array([0, 4096, size // 2, size // 2])
    nbytes = np.array([4096, size // 2 - 4096, 0, size - size // 2])
    there = home.span(0, size)
    host = source.ctypes.data + offsets, target.ctypes.data + offsets
    tier = there.address + offsets
    await engine.copy_columns(AddressColumns(tier, host[0], nbytes, there.on_device, False))
    await engine.copy_columns(AddressColumns(host[1], tier, nbytes, False, there.on_device))
    assert np.array_equal(source, target)
    engine.close()
    with pytest.raises(MemoryMisuseError, match="closed"):
        await engine.copy_columns(AddressColumns(tier, host[0], nbytes, there.on_device, False))


@cuda_only
class TestPinning:
    @pytest.fixture
    def pages(self, memory: VirtualMemory) -> Bytes:
        return np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)

    async def test_pinned_memory_copies_like_any_other(
        self, pages: Bytes, engine: CopyEngine, home: VirtualRange
    ) -> None:
        register_host(pages.ctypes.data, pages.nbytes)
        try:
            half = min(pages.nbytes // 2, home.nbytes)
            pages[:half] = noise(half)
            await engine.copy([(home.span(0, half), span(pages[:half]))])
            await engine.copy([(span(pages[half : 2 * half]), home.span(0, half))])
            assert np.array_equal(pages[:half], pages[half : 2 * half])
        finally:
            unregister_host(pages.ctypes.data)

    def test_pinning_twice_and_unpinning_what_is_not_pinned_are_refused(self, pages: Bytes) -> None:
        address = pages.ctypes.data
        register_host(address, pages.nbytes)
        with pytest.raises(DeviceError, match="ALREADY_REGISTERED: each host range"):
            register_host(address, pages.nbytes)
        unregister_host(address)
        with pytest.raises(DeviceError, match="only addresses that register_host"):
            unregister_host(address)
