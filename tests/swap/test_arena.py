from __future__ import annotations

import gc
import mmap
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from prefixd_swap.arena import CpuArena
from prefixd_swap.errors import MemoryMisuseError, OutOfMemoryError
from prefixd_swap.extents import FreeExtents
from prefixd_swap.slots import PAGE_BYTES, SlotRun, round_to_slot, slots_per_slab

KIB = 1024


@pytest.fixture
def arena() -> Iterator[CpuArena]:
    made = CpuArena(1 << 20)
    yield made
    made.close()


def fill(arena: CpuArena, nbytes: int) -> list[int]:
    offsets = []
    while (offset := arena.allocate(nbytes)) is not None:
        offsets.append(offset)
    return offsets


@pytest.mark.parametrize(
    ("slot", "count"), [(4096, 1), (4096, 1000), (12 * KIB, 7), (64 * KIB, 17), (2 << 20, 1), (2 << 20, 33)]
)
def test_one_size_fills_the_capacity_exactly(slot: int, count: int) -> None:
    arena = CpuArena(slot * count)
    assert arena.room(slot) == count
    offsets = fill(arena, slot)
    assert sorted(offsets) == [i * slot for i in range(count)]
    assert arena.used_bytes == arena.capacity_bytes == slot * count
    assert arena.room(slot) == 0
    arena.check_integrity()
    arena.close()


@given(seed=st.integers(0, 999), count=st.integers(1, 300))
@settings(max_examples=20, deadline=None)
def test_churn_of_one_size_never_loses_a_slot(seed: int, count: int) -> None:
    chance = random.Random(seed)
    arena = CpuArena(count * 8192)
    taken = fill(arena, 8192)
    for _ in range(3):
        chance.shuffle(taken)
        for offset in taken[: chance.randrange(count + 1)]:
            arena.free(offset)
            taken = [kept for kept in taken if kept != offset]
        assert arena.room(5000) == count - len(taken)
        taken += fill(arena, 5000)
        assert len(set(taken)) == count
    arena.check_integrity()
    arena.close()


def test_emptied_memory_serves_another_size(arena: CpuArena) -> None:
    small = fill(arena, 4096)
    assert arena.allocate(256 * KIB) is None
    for offset in small:
        arena.free(offset)
    assert len(fill(arena, 256 * KIB)) == 4
    assert arena.free_bytes == 0


def test_a_slab_in_use_keeps_only_itself_from_other_sizes(arena: CpuArena) -> None:
    kept = [offset for i, offset in enumerate(fill(arena, 4096)) if i == 0 or arena.free(offset)]
    slab = slots_per_slab(4096, arena.capacity_bytes, 32 << 20) * 4096
    assert len(kept) == 1
    assert arena.room(4096) == (1 << 20) // 4096 - 1
    assert arena.room(64 * KIB) == ((1 << 20) - slab) // (64 * KIB)


def test_the_lowest_slab_with_room_is_used_first(arena: CpuArena) -> None:
    """So that the slabs above run empty and can serve other sizes."""
    offsets = fill(arena, 4096)
    slab = slots_per_slab(4096, arena.capacity_bytes, 32 << 20) * 4096
    for offset in (offsets[-1], offsets[0]):
        arena.free(offset)
    assert arena.allocate(4096) == offsets[0] < slab <= offsets[-1]
    arena.check_integrity()


def test_free_refuses_what_was_not_allocated(arena: CpuArena) -> None:
    offset = arena.allocate(8192)
    other = arena.allocate(8192)
    assert offset is not None and other is not None
    with pytest.raises(MemoryMisuseError, match="no slot begins at offset 4096"):
        arena.free(offset + 4096)
    with pytest.raises(MemoryMisuseError, match="no slot begins at offset -1"):
        arena.free(-1)
    arena.free(offset)
    with pytest.raises(MemoryMisuseError, match="not taken"):
        arena.free(offset)
    arena.free(other)
    with pytest.raises(MemoryMisuseError):
        arena.free(other)
    with pytest.raises(MemoryMisuseError, match="0 bytes"):
        arena.allocate(0)
    assert arena.used_bytes == 0
    arena.check_integrity()


def test_span_array_and_descriptor_are_the_same_memory(arena: CpuArena) -> None:
    offset = arena.allocate(5000)
    assert offset is not None
    arena.array(offset, 5000)[:] = 7
    span = arena.span(offset, 5000)
    assert span.address == arena.array(offset, 5000).ctypes.data and span.nbytes == 5000
    with mmap.mmap(arena.fd, arena.capacity_bytes) as elsewhere:
        assert elsewhere[offset : offset + 5000] == b"\7" * 5000
        elsewhere[offset] = 9
    assert arena.array(offset, 1)[0] == 9
    for bad in [(-1, 10), (arena.capacity_bytes - 9, 10), (0, -1)]:
        with pytest.raises(MemoryMisuseError, match="outside"):
            arena.span(*bad)


def test_nobody_can_shrink_the_memory_under_us(arena: CpuArena) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 4096)


def test_populate_brings_every_page_and_stops_on_close() -> None:
    arena = CpuArena(40 << 20, populate=True, huge_pages=True)
    assert arena.wait_populated(30)
    assert os.fstat(arena.fd).st_blocks * 512 >= 40 << 20
    assert not arena.array(39 << 20, 1 << 20).any()
    arena.close()
    quick = CpuArena(256 << 20, populate=True)
    quick.close()
    with pytest.raises(MemoryMisuseError, match="closed"):
        quick.span(0, 1)
    plain = CpuArena(4096)
    assert not plain.wait_populated(0)
    plain.close()


def test_close_frees_everything_even_under_a_live_array() -> None:
    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum("prefixd-arena" in line for line in maps)

    gc.collect()  # what tests before this one have left
    before = mappings()
    descriptors = set(os.listdir("/proc/self/fd"))
    arena = CpuArena(1 << 20)
    array = arena.array(0, 100)
    arena.close()
    arena.close()
    array[:] = 1  # the memory lives as long as the array
    assert array.sum() == 100
    del array, arena
    gc.collect()
    assert mappings() == before
    assert not set(os.listdir("/proc/self/fd")) - descriptors


@pytest.mark.parametrize("nbytes", [0, 4095, 1 << 62, 1 << 70])
def test_impossible_capacities_are_named(nbytes: int) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OutOfMemoryError, match=str(nbytes)):
        CpuArena(nbytes)
    assert not set(os.listdir("/proc/self/fd")) - descriptors


def test_slab_sizing() -> None:
    assert round_to_slot(1) == PAGE_BYTES and round_to_slot(4097) == 2 * PAGE_BYTES
    assert slots_per_slab(4096, 1 << 40, 32 << 20) == 8192
    assert slots_per_slab(8 << 20, 1 << 40, 32 << 20) == 16
    assert slots_per_slab(8 << 20, 64 << 20, 32 << 20) == 1


def test_slot_run_takes_the_lowest_and_refuses_misuse() -> None:
    run = SlotRun(3)
    run.claim_many(np.array([1]))
    assert [run.take(), run.take()] == [0, 2] and run.full
    with pytest.raises(MemoryMisuseError):
        run.take()
    run.give(1)
    assert run.take() == 1
    run.check_integrity()


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=60))
def test_free_extents_against_a_set_of_bytes(steps: list[tuple[int, bool]]) -> None:
    extents, free, held = FreeExtents(40), set(range(40)), []
    for size, give in steps:
        if give and held:
            start, length = held.pop(size % len(held))
            extents.give(start, length)
            free |= set(range(start, start + length))
        else:
            taken = extents.take(size * 2, size)
            longest = max((length for _, length in extents.runs()), default=0)
            if taken is None:
                assert longest < size
                continue
            start, length = taken
            assert length % size == 0 and 0 < length <= size * 2
            assert set(range(start, start + length)) <= free
            free -= set(range(start, start + length))
            held.append(taken)
        assert {b for start, length in extents.runs() for b in range(start, start + length)} == free
        assert extents.free_bytes == len(free)
        ends = [start + length for start, length in extents.runs()]
        assert not set(ends) & {start for start, _ in extents.runs()}, "neighbours must be merged"
    with pytest.raises(MemoryMisuseError):
        FreeExtents(8).give(4, 2)


class ArenaModel(RuleBasedStateMachine):
    """The arena against a dict of what was handed out; every slot keeps its own byte pattern."""

    offsets = Bundle("offsets")

    def __init__(self) -> None:
        super().__init__()
        self.arena = CpuArena(96 * PAGE_BYTES)
        self.held: dict[int, tuple[int, int]] = {}

    @rule(
        target=offsets,
        nbytes=st.sampled_from([1, 4096, 4097, 8192, 20_000, 65_536]),
        mark=st.integers(1, 255),
    )
    def allocate(self, nbytes: int, mark: int) -> int:
        room = self.arena.room(nbytes)
        offset = self.arena.allocate(nbytes)
        assert (offset is None) == (room == 0)
        if offset is None:
            return -1
        assert self.arena.room(nbytes) == room - 1
        assert offset % PAGE_BYTES == 0
        self.arena.array(offset, nbytes)[:] = mark
        self.held[offset] = (nbytes, mark)
        return offset

    @rule(offset=consumes(offsets))
    def free(self, offset: int) -> None:
        if self.held.pop(offset, None):
            self.arena.free(offset)

    @rule()
    def empty(self) -> None:
        for offset in self.held:
            self.arena.free(offset)
        self.held.clear()
        assert self.arena.room(8192) == 48

    @invariant()
    def bytes_and_counters_hold(self) -> None:
        self.arena.check_integrity()
        assert self.arena.used_bytes == sum(round_to_slot(nbytes) for nbytes, _ in self.held.values())
        assert self.arena.slots_used == len(self.held)
        assert self.arena.used_bytes + self.arena.free_bytes == self.arena.capacity_bytes
        for offset, (nbytes, mark) in self.held.items():
            assert (self.arena.array(offset, nbytes) == mark).all()

    def teardown(self) -> None:
        self.arena.close()


TestArenaModel = ArenaModel.TestCase
TestArenaModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
