"""Calls that fail half way: what a row says of its memory stays true, and the call can be made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count

import pytest

from prefixd_swap import KvGeometry, OutOfMemoryError
from prefixd_swap.errors import DeviceError
from prefixd_swap.vmem import FrameId, FramePool, VirtualMemory
from prefixd_swap.vtensor import VirtualSet, VirtualTensor, VirtualTensorManager

Settle = Callable[[], None]
BLOCKS = 7


@pytest.fixture
def pool(memory: VirtualMemory, geometry: KvGeometry) -> FramePool:
    return FramePool(memory, geometry.block_bytes, 12)


@pytest.fixture
def rows(pool: FramePool, geometry: KvGeometry) -> VirtualSet:
    return VirtualSet(pool.memory, pool.table, geometry, 2, 4 * BLOCKS)


@contextmanager
def no_mapping_left(memory: VirtualMemory, name: str, at: int) -> Iterator[None]:
    """The device refuses call number `at` of `name`, `_map` or `_unmap`, and those after it."""
    real, calls = getattr(memory, name), count()

    def refuse(*arguments: object) -> None:
        if next(calls) >= at:
            raise OutOfMemoryError("no mapping left")
        real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, name, refuse)
        yield
    assert next(calls) > at, f"{name} was not called so often"


def frames(*numbers: int) -> list[FrameId]:
    return [FrameId(number) for number in numbers]


def check(rows: VirtualSet, pool: FramePool) -> None:
    """What is noted is so, and every block that counts as mapped is its frame's memory."""
    rows.check_integrity()
    pool.memory.check_integrity()
    for row in rows.rows:
        for block, frame in enumerate(row.mapped):
            if frame != -1:
                kv = rows.kv[row.number, 4 * block : 4 * block + 4]
                kv.fill_(frame + 10 * row.number)
                start = pool.span(frame).address - pool.first_address
                seen = pool._window.tensor((pool.frame_bytes // 4,), kv.dtype, offset=start)
                assert seen.eq(frame + 10 * row.number).all()


@pytest.mark.parametrize("next_call", ["unmap", "map"])
def test_an_unmapping_that_fails_leaves_no_block_that_counts_as_mapped_without_memory(
    rows: VirtualSet, pool: FramePool, settle: Settle, next_call: str
) -> None:
    row = rows.rows[0]
    rows.map(rows.rows[1], 0, frames(0, 1, 2))
    for at in range(2 * rows.geometry.pieces):  # two runs
        rows.map(row, 0, frames(0, 1, 2, 3))
        rows.map(row, 5, frames(9, 8))
        check(rows, pool)
        settle()
        with no_mapping_left(pool.memory, "_unmap", at), pytest.raises(OutOfMemoryError):
            rows.unmap(row, 1)
        first_run = at < rows.geometry.pieces
        assert row.mapped == [0, -1, -1, -1, -1, *((9, 8) if first_run else (-1, -1))]
        assert row.mapped_blocks == (6 if first_run else 3), "what is left of a block has to be unmapped yet"
        check(rows, pool)
        settle()
        if next_call == "unmap":
            assert rows.unmap(row, 1) == (5 if first_run else 2)
            assert row.mapped == [0, *[-1] * 6] and row.mapped_blocks == 1
            check(rows, pool)
        rows.map(row, 0, frames(0, 1, 7, 3, 4, 5, 9))
        check(rows, pool)
        settle()
        rows.unmap(row)
        assert row.mapped_blocks == 0


def test_a_mapping_that_fails_and_cannot_be_taken_back_can_be_made_again(rows: VirtualSet, pool: FramePool) -> None:
    row = rows.rows[1]
    for at in range(rows.geometry.pieces):
        taken_back = no_mapping_left(pool.memory, "_unmap", 0) if at else nullcontext()
        with taken_back, no_mapping_left(pool.memory, "_map", at), pytest.raises(OutOfMemoryError):
            rows.map(row, 2, frames(4, 5))
        assert row.mapped == [-1] * BLOCKS
        check(rows, pool)
        assert rows.map(row, 1, frames(3, 4, 5)) == 3
        check(rows, pool)
        rows.unmap(row)


def test_a_mapping_in_several_runs_that_fails_leaves_none_of_them(rows: VirtualSet, pool: FramePool) -> None:
    row = rows.rows[0]
    for at in range(3 * rows.geometry.pieces):
        rows.map(row, 1, frames(2, 3))
        rows.map(row, 4, frames(5))
        with no_mapping_left(pool.memory, "_map", at), pytest.raises(OutOfMemoryError):
            rows.map(row, 0, frames(1, 2, 3, 4, 5, 6))
        assert row.mapped == [-1, 2, 3, -1, 5, -1, -1] and row.mapped_blocks == 3
        check(rows, pool)
        rows.unmap(row)


def test_frames_are_still_mapped_until_the_last_piece_is_gone(
    pool: FramePool, geometry: KvGeometry, settle: Settle
) -> None:
    """Before that they must not cease to exist."""
    manager = VirtualTensorManager(pool.memory, pool.table, geometry, requests=2, max_tokens=4 * BLOCKS)
    leaving = pool.allocate(3) or []
    tensor = manager.create()
    manager.extend(tensor, leaving)
    settle()
    manager.release(tensor)
    manager.poll(wait=True)
    with no_mapping_left(pool.memory, "_unmap", geometry.pieces - 1), pytest.raises(OutOfMemoryError):
        manager.unused.reclaim(leaving[1:])
    assert manager.unused.still_mapped(leaving) == set(leaving)
    manager.check_integrity()
    assert manager.unused.reclaim(leaving[1:]) == 2 and manager.unused.still_mapped(leaving) == {leaving[0]}
    manager.close()


def test_a_release_that_the_driver_refuses_can_be_made_again(
    pool: FramePool, geometry: KvGeometry, settle: Settle, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = VirtualTensorManager(pool.memory, pool.table, geometry, requests=1, max_tokens=4 * BLOCKS)
    tensor = manager.create()
    manager.extend(tensor, pool.allocate(2) or [])

    def refuse(*_: object) -> None:
        raise DeviceError("cuEventRecord failed")

    with monkeypatch.context() as broken:
        broken.setattr(manager._fence, "retire", refuse)
        with pytest.raises(DeviceError, match="cuEventRecord"):
            manager.release(tensor)
    assert list(manager.live) == [tensor] and manager.releasing_count == 0 and tensor.blocks == 2
    manager.check_integrity()
    settle()
    next_ones: list[VirtualTensor] = []
    manager.release(tensor, on_released=lambda: next_ones.append(manager.create()))
    assert list(manager.live) == next_ones and len(next_ones) == 1, "its row is another's already"
    manager.check_integrity()
    manager.close()
