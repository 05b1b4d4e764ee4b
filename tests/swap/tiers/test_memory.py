"""What every memory tier promises: frames of a pool in host memory, slots of the arena, a simulated tier."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.planner.simulation.memory import UnbackedMemory, UnbackedMemoryTier
from prefixd_swap import CpuArena, FramePool, KvGeometry, MemoryMisuseError, create_memory
from prefixd_swap.tiers import NO_SLOT, CpuTier, GpuTier, MemoryTier, can_move
from prefixd_swap.transfers import Transfers
from tests.swap.simulated_memory import SimulatedMemoryTier
from tests.swap.tiers.stores import simulated

BLOCK_BYTES = 128 << 10
BLOCKS = 16


def frames(stack: ExitStack) -> GpuTier:
    memory = stack.enter_context(create_memory("cpu", 64 << 10))
    pool = FramePool(memory, KvGeometry(2, 2, 1024, "float32", 4).block_bytes, BLOCKS)
    assert pool.frame_bytes == BLOCK_BYTES
    stack.callback(pool.close)
    return GpuTier(pool)


def arena(stack: ExitStack) -> CpuTier:
    memory = CpuArena(BLOCKS * BLOCK_BYTES)
    stack.callback(memory.close)
    return CpuTier(memory)


def pretended(stack: ExitStack) -> SimulatedMemoryTier:
    tier = SimulatedMemoryTier(BLOCKS * BLOCK_BYTES, name="near", level=0, on_device=True)
    stack.callback(tier.close)
    return tier


def accounted(stack: ExitStack) -> UnbackedMemoryTier:
    del stack
    return UnbackedMemoryTier(BLOCKS * BLOCK_BYTES, name="cpu", level=1, shared=True)


def accounted_frames(stack: ExitStack) -> GpuTier:
    pool = FramePool(stack.enter_context(UnbackedMemory(BLOCK_BYTES)), BLOCK_BYTES, BLOCKS)
    stack.callback(pool.close)
    return GpuTier(pool)


MAKERS: list[Callable[[ExitStack], MemoryTier]] = [frames, arena, pretended, accounted, accounted_frames]


@pytest.fixture(params=MAKERS)
def tier(request: pytest.FixtureRequest) -> Iterator[MemoryTier]:
    with ExitStack() as stack:
        made: MemoryTier = request.param(stack)
        yield made
        made.check_integrity()


def test_all_of_a_tier_can_be_had_and_given_back(tier: MemoryTier) -> None:
    assert tier.capacity_bytes == BLOCKS * BLOCK_BYTES and tier.room(BLOCK_BYTES) == BLOCKS
    first = tier.allocate((BLOCK_BYTES,), 5)
    second = tier.allocate((BLOCK_BYTES,), 100, near=first[-1])
    assert (first.shape, second.shape) == ((5, 1), (BLOCKS - 5, 1)) and first.dtype == np.int64
    assert tier.allocate((BLOCK_BYTES,), 1).shape == (0, 1)
    both = np.concatenate([first, second])
    assert sorted(both.ravel().tolist()) == tier.allocated().tolist()
    assert tier.used_bytes == tier.capacity_bytes and tier.room(BLOCK_BYTES) == 0
    tier.free(both)
    assert tier.used_bytes == 0 and not tier.in_flight and not tier.allocated().size


def test_slots_are_in_flight_until_they_are_entered_or_freed(tier: MemoryTier) -> None:
    slots = tier.allocate((BLOCK_BYTES,), 3)
    assert tier.in_flight.keys() == set(slots.ravel().tolist())
    tier.entered(np.append(slots[0], NO_SLOT))
    assert tier.in_flight.keys() == set(slots[1:].ravel().tolist())
    tier.free(np.append(slots[1:].ravel(), NO_SLOT))
    assert not tier.in_flight and tier.allocated().tolist() == slots[0].tolist()
    tier.free(slots[0])


def test_slots_have_memory_of_their_own(tier: MemoryTier) -> None:
    slots = tier.allocate((BLOCK_BYTES,), 4)
    addresses = tier.addresses(slots)
    assert addresses.shape == slots.shape
    gaps = np.diff(np.sort(addresses.ravel()))
    assert (gaps >= BLOCK_BYTES).all()
    tier.free(slots)


def test_misuse_is_refused(tier: MemoryTier) -> None:
    slots = tier.allocate((BLOCK_BYTES,), 1)
    with pytest.raises(MemoryMisuseError, match=str(1 << 50)):
        tier.addresses(np.array([1 << 50]))
    assert not tier.ever_fits((tier.capacity_bytes + 1,))
    with pytest.raises(MemoryMisuseError, match="fit"):
        tier.allocate((tier.capacity_bytes + 1,), 1)
    tier.free(slots)
    with pytest.raises(MemoryMisuseError):
        tier.free(slots)


def test_a_tier_says_what_it_is() -> None:
    with ExitStack() as stack:
        gpu, cpu, near = (make(stack) for make in MAKERS[:3])
        far = simulated(Transfers(), 1 << 20)
        assert [(tier.name, tier.level) for tier in (gpu, cpu, near, far)] == [
            ("gpu", 0),
            ("cpu", 1),
            ("near", 0),
            ("far", 3),
        ]
        assert [tier.addressable for tier in (gpu, cpu, near, far)] == [True, True, False, False]
        assert [tier.shared for tier in (gpu, cpu, near, far)] == [False, True, False, False]
        assert [tier.durable for tier in (gpu, cpu, near, far)] == [False, False, False, True]
        assert can_move(gpu, far) and can_move(far, cpu) and can_move(near, cpu)
        assert not can_move(near, far) and not can_move(far, near) and not can_move(far, far)


def test_tiers_of_a_plan_are_larger_than_any_memory_and_say_that_they_have_no_bytes() -> None:
    tier = UnbackedMemoryTier(1 << 50, name="cpu", level=1, shared=True)
    assert tier.allocate((64 << 20,), 1000).shape == (1000, 1) and not tier.backed
    with ExitStack() as stack:
        gpu = accounted_frames(stack)
        assert not gpu.backed and gpu.on_device and not can_move(gpu, simulated(Transfers(), 1 << 20))
        assert [make(stack).backed for make in (frames, arena, pretended)] == [True] * 3
    with pytest.raises(MemoryMisuseError, match="holds nothing"):
        UnbackedMemoryTier(100, name="cpu", level=1)


def test_each_part_takes_a_frame_and_any_frame_serves_any_part() -> None:
    with ExitStack() as stack:
        gpu = frames(stack)
        assert gpu.ever_fits((BLOCK_BYTES,) * BLOCKS) and not gpu.ever_fits((1,) * (BLOCKS + 1))
        assert gpu.footprint((1, BLOCK_BYTES)) == 2 * BLOCK_BYTES
        blocks = gpu.allocate((BLOCK_BYTES, 1, 1), BLOCKS)
        assert blocks.shape == (BLOCKS // 3, 3) and len(np.unique(blocks)) == blocks.size
        gpu.free(blocks[:, 1])
        assert gpu.room(BLOCK_BYTES) == BLOCKS - 2 * (BLOCKS // 3)
        gpu.free(blocks[:, [0, 2]])
        assert not gpu.in_flight


def test_a_part_that_is_larger_than_a_frame_has_no_place() -> None:
    with ExitStack() as stack:
        gpu = frames(stack)
        assert not gpu.ever_fits((1, BLOCK_BYTES + 1)) and gpu.room(BLOCK_BYTES + 1) == 0
        assert not gpu.ever_fits(())
        with pytest.raises(MemoryMisuseError, match="at most a frame's size"):
            gpu.allocate((1, BLOCK_BYTES + 1), 1)


def test_a_block_has_all_its_parts_or_none() -> None:
    with ExitStack() as stack:
        cpu = arena(stack)
        small = cpu.allocate((4096,), 1000)
        cpu.free(small[: len(small) - 3])
        cpu.free(small[len(small) - 3 :])
        slots = cpu.allocate((96 << 10, 32 << 10), 1000)
        assert slots.shape[1] == 2 and 0 < len(slots) <= BLOCKS
        assert len(cpu.allocated()) == 2 * len(slots), "parts of a block that did not fit were given back"
        assert len(cpu.in_flight) == 2 * len(slots)
        cpu.free(slots)
        cpu.check_integrity()


@given(seed=st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_churn_of_mixed_sizes_loses_nothing(seed: int) -> None:
    chance = random.Random(seed)
    with ExitStack() as stack:
        cpu = arena(stack)
        held: list[np.ndarray] = []
        for _ in range(60):
            if held and chance.random() < 0.5:
                cpu.free(held.pop(chance.randrange(len(held))))
            else:
                sizes = chance.choice([(4096,), (10_000, 4096), (64 << 10,), (1, 1, 1)])
                slots = cpu.allocate(sizes, chance.randint(0, 8))
                if len(slots):
                    held.append(slots)
            expected = sorted(slot for slots in held for slot in slots.ravel().tolist())
            assert cpu.allocated().tolist() == expected == sorted(cpu.in_flight)
            cpu.check_integrity()
