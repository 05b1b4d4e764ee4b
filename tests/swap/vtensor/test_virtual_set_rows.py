"""What a row of virtual addresses knows of its mappings: a new request asks every idle row."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from prefixd_swap import KvGeometry
from prefixd_swap.errors import IntegrityError
from prefixd_swap.vmem import FrameId, FramePool, create_memory
from prefixd_swap.vtensor import VirtualSet, VirtualTensorManager
from prefixd_swap.vtensor.virtual_set import Row


def numbers(values: list[int]) -> list[FrameId]:
    return [FrameId(value) for value in values]


def test_common_is_the_number_of_equal_frames_from_the_first_wanted_on() -> None:
    source = random.Random(3)
    for _ in range(500):
        row = Row(0, source.randint(1, 9))
        row.put(0, numbers([source.choice((-1, 0, 1)) for _ in row.mapped]))
        wanted = numbers([source.choice((0, 1)) for _ in range(source.randint(0, 12))])
        if source.random() < 0.6:
            wanted[: len(row.mapped)] = row.mapped[: len(wanted)]
            if wanted and source.random() < 0.7:
                wanted[source.randrange(len(wanted))] = FrameId(7)
        both = list(zip(row.mapped, wanted, strict=False))
        while both and both[0][1] == -1:
            both.pop(0)
        expected = 0
        for ours, theirs in both:
            if ours != theirs:
                break
            expected += 1
        assert row.common(wanted) == expected, (row.mapped, wanted)


def test_a_row_counts_its_mapped_blocks_through_map_replace_and_unmap() -> None:
    geometry = KvGeometry(1, 1, 512, "float32", block_tokens=1)
    with create_memory("cpu", 4096) as memory:
        pool = FramePool(memory, geometry.block_bytes, 8)
        rows = VirtualSet(memory, pool.table, geometry, 2, 6)
        row = rows.rows[0]
        for first, frames, counted in ((0, [1, 5, 3], 3), (1, [5, 6, 2], 4), (5, [1], 5)):
            rows.map(row, first, numbers(frames))
            assert row.mapped_blocks == counted
        rows.unmap(row, 1, 3)
        assert row.mapped_blocks == 3 and rows.rows[1].mapped_blocks == 0
        rows.check_integrity()
        row.mapped_blocks -= 1
        with pytest.raises(IntegrityError, match="row 0 maps 3 blocks, but counts 2"):
            rows.check_integrity()
        rows.close()
        pool.close()


def test_frames_are_found_wherever_they_are_mapped() -> None:
    source = random.Random(4)
    geometry = KvGeometry(1, 1, 512, "float32", block_tokens=1)
    with create_memory("cpu", 4096) as memory:
        pool = FramePool(memory, geometry.block_bytes, 8)
        rows = VirtualSet(memory, pool.table, geometry, 4, 6)
        for _ in range(100):
            row, first = source.choice(rows.rows), source.randrange(6)
            if source.random() < 0.4:
                rows.unmap(row, first)
            else:
                rows.map(row, first, numbers(source.choices(range(8), k=source.randint(0, 6 - first))))
            gone = set(source.sample(range(8), source.randint(0, 3)))
            found = {number: blocks.tolist() for number, blocks in rows.find(numbers([*gone])).items()}
            expected = [[block for block, frame in enumerate(row.mapped) if frame in gone] for row in rows.rows]
            assert found == {number: blocks for number, blocks in enumerate(expected) if blocks}
        rows.close()
        pool.close()


def test_giving_up_frames_does_not_look_at_every_block_in_turn() -> None:
    """A tier that shrinks asks between two passes, hundreds of times: it was 16 ms for 80 rows of 2,048 blocks."""

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(3):
            start = time.thread_time()
            work()
            times.append(time.thread_time() - start)
        return min(times)

    geometry = KvGeometry(1, 1, 512, "float32", block_tokens=1)
    with create_memory("cpu", 4096) as memory:
        pool = FramePool(memory, geometry.block_bytes, 128)
        manager = VirtualTensorManager(memory, pool.table, geometry, requests=80, max_tokens=2048)
        tensor = manager.create()
        manager.extend(tensor, frames := pool.allocate(128) or [])
        manager.release(tensor)
        gone = set(frames[64:])
        rows = manager.virtual.rows
        one_by_one = seconds(lambda: [frame in gone for row in rows for frame in row.mapped])
        assert seconds(lambda: manager.unused.still_mapped(gone)) < one_by_one / 4
        assert manager.unused.reclaim(gone) == 64 and not manager.unused.still_mapped(gone)
        assert seconds(lambda: manager.unused.reclaim(gone)) < one_by_one / 4
        manager.close()
        pool.close()
