from __future__ import annotations

import gc
import mmap
import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from prefixd_swap.arena import CpuArena
from prefixd_swap.errors import MemoryMisuseError, OutOfMemoryError
from prefixd_swap.slots import PAGE_BYTES, round_to_slot

KIB = 1024


@pytest.fixture
def arena() -> Iterator[CpuArena]:
    made = CpuArena(1 << 20)
    yield made
    made.close()


def fill(arena: CpuArena, nbytes: int) -> list[int]:
    offsets = []
    while (offset := arena.pages.allocate(nbytes)) is not None:
        offsets.append(offset)
    return offsets


@pytest.mark.parametrize(
    ("slot", "count"), [(4096, 1), (4096, 1000), (12 * KIB, 7), (64 * KIB, 17), (2 << 20, 1), (2 << 20, 33)]
)
def test_one_size_fills_the_capacity_exactly(slot: int, count: int) -> None:
    arena = CpuArena(slot * count)
    assert arena.pages.room(slot) == count
    offsets = fill(arena, slot)
    assert sorted(offsets) == [i * slot for i in range(count)]
    assert arena.pages.used_bytes == arena.capacity_bytes == slot * count
    assert arena.pages.room(slot) == 0
    arena.pages.check_integrity()
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
            arena.pages.free(offset)
            taken = [kept for kept in taken if kept != offset]
        assert arena.pages.room(5000) == count - len(taken)
        taken += fill(arena, 5000)
        assert len(set(taken)) == count
    arena.pages.check_integrity()
    arena.close()


def test_emptied_memory_serves_another_size(arena: CpuArena) -> None:
    small = fill(arena, 4096)
    assert arena.pages.allocate(256 * KIB) is None
    for offset in small:
        arena.pages.free(offset)
    assert len(fill(arena, 256 * KIB)) == 4
    assert arena.pages.used_bytes == arena.capacity_bytes


def test_many_slots_are_taken_and_freed_at_once(arena: CpuArena) -> None:
    offsets = arena.pages.allocate_many(4000, 200)
    assert offsets is not None and len(set(offsets.tolist())) == 200
    assert arena.pages.allocated().tolist() == sorted(offsets.tolist())
    assert arena.pages.allocate_many(4096, 57) is None and arena.pages.slots_used == 200
    arena.pages.free_many(offsets[::2])
    assert arena.pages.slots_used == 100 and arena.pages.room(4096) == 156
    arena.pages.check_integrity()


def test_free_refuses_what_was_not_allocated(arena: CpuArena) -> None:
    assert arena.pages.room(8192) == 128  # so that a page has two slots of 4096 bytes
    offset = arena.pages.allocate(4096)
    other = arena.pages.allocate(4096, near=offset)
    assert offset is not None and other is not None
    with pytest.raises(MemoryMisuseError, match="no slot begins at offset 2048"):
        arena.pages.free(offset + 2048)
    with pytest.raises(MemoryMisuseError, match="no slot begins at offset -1"):
        arena.pages.free(-1)
    arena.pages.free(offset)
    with pytest.raises(MemoryMisuseError, match="not taken"):
        arena.pages.free(offset)
    arena.pages.free(other)
    with pytest.raises(MemoryMisuseError):
        arena.pages.free(other)
    with pytest.raises(MemoryMisuseError, match="0 bytes"):
        arena.pages.allocate(0)
    assert arena.pages.used_bytes == 0
    arena.pages.check_integrity()


def test_span_array_and_descriptor_are_the_same_memory(arena: CpuArena) -> None:
    offset = arena.pages.allocate(5000)
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


def test_slots_are_whole_memory_pages() -> None:
    assert round_to_slot(1) == PAGE_BYTES and round_to_slot(4097) == 2 * PAGE_BYTES
    with pytest.raises(MemoryMisuseError, match="-1 bytes"):
        round_to_slot(-1)


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
        room = self.arena.pages.room(nbytes)
        offset = self.arena.pages.allocate(nbytes)
        assert (offset is None) == (room == 0)
        if offset is None:
            return -1
        assert self.arena.pages.room(nbytes) == room - 1
        assert offset % PAGE_BYTES == 0
        self.arena.array(offset, nbytes)[:] = mark
        self.held[offset] = (nbytes, mark)
        return offset

    @rule(offset=consumes(offsets))
    def free(self, offset: int) -> None:
        if self.held.pop(offset, None):
            self.arena.pages.free(offset)

    @rule()
    def empty(self) -> None:
        for offset in self.held:
            self.arena.pages.free(offset)
        self.held.clear()
        assert self.arena.pages.room(8192) == 48

    @invariant()
    def bytes_and_counters_hold(self) -> None:
        self.arena.pages.check_integrity()
        assert self.arena.pages.used_bytes == sum(round_to_slot(nbytes) for nbytes, _ in self.held.values())
        assert self.arena.pages.slots_used == len(self.held)
        for offset, (nbytes, mark) in self.held.items():
            assert (self.arena.array(offset, nbytes) == mark).all()

    def teardown(self) -> None:
        self.arena.close()


TestArenaModel = ArenaModel.TestCase
TestArenaModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
