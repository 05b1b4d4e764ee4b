from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixd_swap.errors import (
    DeviceError,
    GeometryError,
    IntegrityError,
    MemoryMisuseError,
    OutOfMemoryError,
    SwapError,
)
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem import FrameId, FramePool, VirtualMemory, create_memory
from prefixd_swap.vmem.backends import linux
from prefixd_swap.vmem.free_runs import FreeRuns
from tests.swap.conftest import used_bytes


@pytest.fixture
def pool(memory: VirtualMemory, geometry: KvGeometry) -> FramePool:
    return FramePool(memory, geometry.block_bytes, 8)


def test_frames_are_consecutive_chunks_in_one_window(pool: FramePool, geometry: KvGeometry) -> None:
    frames = pool.allocate(8)
    assert frames is not None
    spans = [pool.span(frame) for frame in frames]
    assert [span.address for span in spans] == [spans[0].address + i * geometry.block_bytes for i in range(8)]
    assert {(span.nbytes, span.on_device) for span in spans} == {(geometry.block_bytes, pool.memory.on_device)}
    assert pool.table.chunks(frames).tolist() == [[2 * frame, 2 * frame + 1] for frame in frames]


def test_a_frame_holds_what_is_written_to_its_span(pool: FramePool) -> None:
    frames = pool.allocate(2)
    assert frames is not None
    mapped = pool.memory.reserve(2 * pool.memory.chunk_bytes)
    mapped.map(0, pool.table.chunks(frames[1:]).reshape(-1))
    view = mapped.tensor((2 * pool.memory.chunk_bytes,), torch.uint8)
    view.fill_(3)
    assert pool._window.tensor((1,), torch.uint8, offset=pool.span(frames[1]).address - pool._window.base).item() == 3


def test_all_or_nothing(pool: FramePool) -> None:
    assert pool.allocate(9) is None
    assert (pool.free_count, pool.used_count) == (8, 0)
    assert pool.allocate(0) == []
    taken = pool.allocate(8)
    assert taken is not None and pool.allocate(1) is None
    pool.free(taken)
    assert pool.free_count == 8
    pool.check_integrity()


def test_consecutive_frames_are_preferred_to_scattered_ones(pool: FramePool) -> None:
    frames = pool.allocate(8)
    assert frames == list(range(8))
    pool.free([frames[i] for i in (0, 2, 4, 5, 6)])
    assert pool.allocate(3) == [4, 5, 6]
    assert pool.allocate(2) == [0, 2]


@pytest.mark.parametrize(
    "frames",
    [[3, 3], [0, 7], [8], [-1]],
    ids=["twice in one call", "one not allocated", "past the end", "negative"],
)
def test_a_wrong_free_is_refused_as_a_whole(pool: FramePool, frames: list[int]) -> None:
    pool.allocate(4)
    with pytest.raises(MemoryMisuseError, match=str(frames[-1])):
        pool.free([FrameId(frame) for frame in frames])
    assert pool.used_count == 4
    pool.check_integrity()


@pytest.mark.slow
def test_impossible_pools_are_refused(memory: VirtualMemory, geometry: KvGeometry) -> None:
    with pytest.raises(MemoryMisuseError, match="0 frames"):
        FramePool(memory, geometry.block_bytes, 0)
    odd = KvGeometry(1, 1, 100, "float16", block_tokens=3)
    with pytest.raises(GeometryError, match="whole number of chunks"):
        FramePool(memory, odd.block_bytes, 4)
    with pytest.raises(OutOfMemoryError):
        FramePool(memory, geometry.block_bytes, (1 << 42) // geometry.block_bytes)
    assert memory.chunk_count == 0


def test_two_pools_share_a_memory(memory: VirtualMemory, geometry: KvGeometry) -> None:
    one, two = FramePool(memory, geometry.block_bytes, 2), FramePool(memory, geometry.block_bytes, 3)
    assert two.table.chunks([FrameId(0)]).tolist() == [[4, 5]]
    one.close()
    one.close()
    assert memory.chunk_count == 6
    two.check_integrity()


def test_integrity_notices_a_frame_that_is_neither(pool: FramePool) -> None:
    pool.allocate(2)
    pool._used[1] = False
    with pytest.raises(IntegrityError, match="frame 1 is counted 0 times"):
        pool.check_integrity()


def test_destroying_goes_on_where_it_failed(pool: FramePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the process has no mapping left for a while."""
    pool.allocate(8)
    leaving = [FrameId(frame) for frame in (0, 1, 4)]
    pool.withdraw(leaving)
    unmap = pool._window.unmap

    def fail_at_the_second(offset: int, nbytes: int) -> None:
        if offset:
            raise OutOfMemoryError("no mapping is left")
        unmap(offset, nbytes)

    with monkeypatch.context() as broken:
        broken.setattr(pool._window, "unmap", fail_at_the_second)
        with pytest.raises(OutOfMemoryError):
            pool.destroy(leaving)
    pool.check_integrity()
    pool.destroy(leaving)
    pool.forget(leaving)
    pool.check_integrity()
    assert pool.memory.chunk_count == 2 * 5


@pytest.mark.parametrize("then", ["destroy", "close"])
def test_destroying_goes_on_behind_the_memory_that_is_gone(
    pool: FramePool, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    pool.allocate(8)
    leaving = [FrameId(frame) for frame in (0, 1, 4, 6)]
    pool.withdraw(leaving)
    memory, before = pool.memory, used_bytes(pool.memory)
    destroy = memory._destroy

    def fail_behind_the_first(chunks: range) -> None:
        if chunks.start:
            raise DeviceError("not now")
        destroy(chunks)

    with monkeypatch.context() as broken:
        broken.setattr(memory, "_destroy", fail_behind_the_first)
        for _ in range(2):
            with pytest.raises(DeviceError, match="not now"):
                pool.destroy(leaving)
    assert used_bytes(memory) == before - 2 * pool.frame_bytes
    if then == "close":
        pool.close()
        assert memory.chunk_count == 0
        return
    pool.destroy(leaving)
    pool.destroy(leaving)
    assert used_bytes(memory) == before - 4 * pool.frame_bytes
    pool.forget(leaving)
    pool.check_integrity()
    assert memory.chunk_count == 2 * 4


def test_a_memory_file_that_cannot_be_cut_is_an_error_of_this_package(tmp_path: Path) -> None:
    """Whoever resizes a tier catches those, and says why it stopped."""
    (tmp_path / "readable").write_bytes(bytes(4096))
    with (tmp_path / "readable").open("rb") as file, pytest.raises(SwapError, match="4096 bytes at 0 of a memory file"):
        linux.punch_hole(file.fileno(), 0, 4096)


def test_a_plan_says_how_many_frames_last(pool: FramePool) -> None:
    pool.plan(5)
    assert (pool.lasting, pool.capacity) == (5, 8)
    pool.plan(9)
    assert pool.lasting == 8
    pool.plan(None)
    assert pool.lasting == 8


def test_reserved_addresses_cost_nothing_until_they_are_mapped(memory: VirtualMemory) -> None:
    """A range for all that the device could ever have: its book-keeping is as large as what was mapped."""
    chunk = memory.chunk_bytes
    reserved = memory.reserve(chunk << 14)
    chunks = memory.create(4)
    reserved.map(0, list(chunks)[:2])
    reserved.map(2 * chunk, list(chunks)[2:])
    assert reserved.chunks(0, 6 * chunk).tolist() == [*chunks, -1, -1]
    assert len(reserved._slots) <= 16
    reserved.unmap(chunk, 2 * chunk)
    memory.check_integrity()
    assert reserved.chunks((chunk << 14) - chunk, chunk).tolist() == [-1]
    reserved.unmap(0, chunk)
    reserved.unmap(3 * chunk, chunk)
    reserved.close()


def test_a_device_says_what_it_has(memory: VirtualMemory) -> None:
    assert 0 < memory.available_bytes() <= memory.total_bytes()


def test_a_pool_grows_and_shrinks_while_frames_are_used(memory: VirtualMemory, geometry: KvGeometry) -> None:
    pool = FramePool(memory, geometry.block_bytes, 2, most=5)
    kept = pool.allocate(2)
    assert kept is not None and pool.allocate(1) is None
    new = pool.create(3)
    assert pool.capacity == 2, "created is not yet had"
    pool.admit(new)
    assert (pool.capacity, pool.free_count, memory.chunk_count) == (5, 3, 10)
    with pytest.raises(MemoryMisuseError, match="1 more frames are not possible: there are 5"):
        pool.create(1)
    leaving = pool.allocate(2)
    assert leaving == [2, 3]
    pool.withdraw(leaving)
    assert (pool.capacity, pool.used_count, pool.free_count) == (3, 2, 1)
    pool.check_integrity()
    with pytest.raises(MemoryMisuseError, match="not withdrawn"):
        pool.destroy(kept)
    pool.destroy(leaving)
    assert memory.chunk_count == 6
    pool.forget(leaving)
    pool.check_integrity()
    pool.admit(pool.create(1))
    assert pool.table.frames().tolist() == [0, 1, 2, 4], "a number that is free comes again"
    assert pool.span(FrameId(4)).address == pool.first_address + 4 * geometry.block_bytes
    with pytest.raises(MemoryMisuseError, match="frame 3 does not exist"):
        pool.free([FrameId(3)])
    with pytest.raises(MemoryMisuseError, match="4 of 4 frames cannot go"):
        pool.withdraw([*kept, *(pool.allocate(2) or [])])
    pool.check_integrity()


@pytest.mark.slow
def test_growing_beyond_the_memory_leaves_the_pool_as_it_was(memory: VirtualMemory, geometry: KvGeometry) -> None:
    frames = (1 << 42) // geometry.block_bytes
    pool = FramePool(memory, geometry.block_bytes, 2, most=frames)
    with pytest.raises(OutOfMemoryError):
        pool.create(frames - 2)
    assert (pool.capacity, memory.chunk_count) == (2, 4)
    pool.check_integrity()


class FrameMachine(RuleBasedStateMachine):
    """A pool against a plain set of the frames that are out."""

    FRAMES = 24

    def __init__(self) -> None:
        super().__init__()
        self.memory = create_memory("cpu", 4096)
        self.pool = FramePool(self.memory, KvGeometry(1, 1, 512, "float32", block_tokens=2).block_bytes, self.FRAMES)
        self.out: set[FrameId] = set()

    @rule(count=st.integers(0, FRAMES + 1))
    def allocate(self, count: int) -> None:
        free = sorted(set(range(self.FRAMES)) - self.out)
        frames = self.pool.allocate(count)
        if count > len(free):
            assert frames is None
            return
        assert frames is not None and len(frames) == count
        assert len(set(frames)) == count and not self.out & set(frames)
        runs_possible = any(free[i : i + count] == list(range(free[i], free[i] + count)) for i in range(len(free)))
        if count and runs_possible:
            assert frames == list(range(frames[0], frames[0] + count)), "a run was there, so a run it must be"
        self.out |= set(frames)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        frames = data.draw(st.lists(st.sampled_from(sorted(self.out)), unique=True))
        self.pool.free(frames)
        self.out -= set(frames)

    @precondition(lambda self: len(self.out) < self.FRAMES)
    @rule(data=st.data())
    def free_what_is_free(self, data: st.DataObject) -> None:
        frame = data.draw(st.sampled_from(sorted(set(range(self.FRAMES)) - self.out)))
        with pytest.raises(MemoryMisuseError):
            self.pool.free([FrameId(frame), *self.out])

    @invariant()
    def every_frame_is_counted_once(self) -> None:
        self.pool.check_integrity()
        assert self.pool.used_count == len(self.out)
        assert self.pool.free_count + self.pool.used_count == self.pool.capacity

    def teardown(self) -> None:
        self.memory.close()


def test_frames_follow_the_model() -> None:
    run_state_machine_as_test(FrameMachine, settings=settings(max_examples=50, stateful_step_count=30))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.data())
def test_free_runs_merge_back_into_one(takes: list[int], data: st.DataObject) -> None:
    free = FreeRuns(100)
    taken = [run for count in takes for run in free.take(count) or []]
    free.check_integrity()
    for run in data.draw(st.permutations(taken)):
        free.give(run)
        free.check_integrity()
    assert list(free.runs()) == [range(0, 100)] and len(free) == 100


def test_without_a_long_run_the_fewest_are_used() -> None:
    free = FreeRuns(20)
    everything = free.take(20)
    assert everything == [range(0, 20)]
    for run in (range(0, 2), range(4, 9), range(12, 15)):
        free.give(run)
    assert free.take(8) == [range(4, 9), range(12, 15)]
    assert free.take(3) is None and len(free) == 2
