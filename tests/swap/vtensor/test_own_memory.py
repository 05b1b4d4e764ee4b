"""Virtual tensors that grow with the manager's own frames: they stay mapped, are mapped ahead, and are taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem import FrameTable, VirtualMemory
from prefixd_swap.vtensor import VirtualTensorManager
from prefixd_swap.vtensor.own_memory import grow, grow_all, prepare

Settle = Callable[[], None]
MAX_TOKENS = 22  # five blocks of four tokens, and half a block
REQUESTS = 3


@pytest.fixture
def owner(
    memory: VirtualMemory, geometry: KvGeometry, background: ThreadPoolExecutor | None, settle: Settle
) -> Iterator[VirtualTensorManager]:
    """One that creates its frames itself, eight at most."""
    table = FrameTable(geometry.chunks_per_block(memory.chunk_bytes))
    made = VirtualTensorManager(
        memory, table, geometry, requests=REQUESTS, max_tokens=MAX_TOKENS, limit=8, background=background
    )
    yield made
    settle()
    made.check_integrity()
    made.close()


def test_own_frames_are_created_on_demand_and_stay_mapped(owner: VirtualTensorManager, settle: Settle) -> None:
    """vAttention's deferred reclamation (6.2.2): the next request finds memory where it begins."""
    tensor = owner.create()
    assert grow(owner, tensor, 10) and owner.physical._table.count == 3
    assert grow(owner, tensor, 11) and owner.physical._table.count == 3
    frames = tensor.frames
    owner.release(tensor)
    owner.poll(wait=True)
    assert owner.physical.free_count == 3
    mapped = owner.mapping.counts.mapped
    again = owner.create()
    assert grow(owner, again, 12) and again.frames == frames
    assert owner.mapping.counts.mapped == mapped
    other = owner.create()
    assert grow(owner, other, 20) and not grow(owner, again, 16), "eight frames are all"
    assert again.blocks == 3
    settle()
    owner.release(other)
    owner.poll(wait=True)
    assert grow(owner, again, 16)
    assert owner.unused.reclaim() == 5
    assert len(owner.physical.p_free(keep=1)) == 3
    assert owner.memory.chunk_count == 5 * owner.physical._table.frame_chunks
    settle()


def test_memory_that_is_free_but_mapped_cannot_go(owner: VirtualTensorManager) -> None:
    tensor = owner.create()
    assert grow(owner, tensor, 4)
    owner.release(tensor)
    owner.poll(wait=True)
    with pytest.raises(MemoryMisuseError, match="unmap it before destroying"):
        owner.physical.p_free()
    owner.check_integrity()
    owner.unused.reclaim()
    owner.physical.p_free()


def test_a_batch_grows_in_whole_or_not_at_all(owner: VirtualTensorManager) -> None:
    one, two = owner.create(), owner.create()
    assert grow_all(owner, {one: 9, two: 4})
    assert (one.blocks, two.blocks) == (3, 1)
    assert not grow_all(owner, {one: 16, two: 20}), "five blocks more, four are left"
    with pytest.raises(MemoryMisuseError, match="25 tokens do not fit"):
        grow_all(owner, {one: 16, two: 25})
    assert (one.blocks, two.blocks) == (3, 1) and owner.physical._table.count == 4
    assert grow_all(owner, {one: 16, two: 1}) and (one.blocks, two.blocks) == (4, 1)


def test_blocks_that_are_not_needed_after_all_are_given_back(owner: VirtualTensorManager) -> None:
    tensor = owner.create()
    assert grow(owner, tensor, 20)
    owner.wait([tensor])
    frames = tensor.frames
    owner.truncate(tensor, 9)
    assert tensor.frames == frames[:3] and owner.physical.free_count == 2
    mapped = owner.mapping.counts.mapped
    assert grow(owner, tensor, 20) and tensor.frames == frames
    owner.wait([tensor])
    assert owner.mapping.counts.mapped == mapped


def test_another_request_takes_the_last_blocks_of_an_ended_one_first(owner: VirtualTensorManager) -> None:
    ended, other = owner.create(), owner.create()
    assert grow(owner, ended, 20) and grow(owner, other, 12)
    frames = ended.frames
    owner.release(ended)
    owner.poll(wait=True)
    assert grow(owner, other, 20) and set(other.frames[3:]) == set(frames[3:])
    again = owner.create()
    assert again.row == ended.row
    assert grow(owner, again, 12) and again.frames == frames[:3], "it begins where the memory is still mapped"


def test_memory_is_mapped_ahead_and_stays_free(owner: VirtualTensorManager, settle: Settle) -> None:
    """vAttention's eager allocation (6.2.2)."""
    tensor = owner.create()
    assert grow(owner, tensor, 8)
    for most, taken in ((2, 2), (0, 0), (9, 1), (9, 0)):
        assert prepare(owner, 12, most) == taken
        owner.check_integrity()
    assert owner.mapping.counts.mapped == 5 and owner.physical.free_count == 3
    following = owner.create()
    assert grow(owner, following, 11)
    owner.wait([following])
    assert owner.mapping.counts.mapped == 5
    assert prepare(owner, 999, most=99) == 0, "more than there is"
    last = owner.create()
    assert grow(owner, last, 12) and prepare(owner, 4, most=1) == 0, "no row is left"
    settle()


def test_ended_requests_are_unmapped_until_enough_is(owner: VirtualTensorManager, settle: Settle) -> None:
    """vAttention's reclamation (6.2.2)."""
    tensors = [owner.create() for _ in range(REQUESTS)]
    assert grow_all(owner, {tensors[0]: 8, tensors[1]: 12, tensors[2]: 12})
    old = tensors[0].frames
    owner.wait(tensors)
    settle()
    owner.release(tensors[0])
    owner.release(tensors[1])
    owner.truncate(tensors[2], 4)
    owner.poll(wait=True)
    assert owner.physical.unmapped_count == 0 and owner.physical.free_count == 7
    assert owner.unused.reclaim_until(0) == 0
    assert owner.unused.reclaim_until(1) == 1 and owner.unused.still_mapped(old) == {old[0]}, (
        "the longest idle, from its end"
    )
    assert owner.unused.reclaim_until(1) == 0
    assert owner.unused.reclaim_until(3) == 2, "the other block, and one behind the end of the request that runs"
    assert owner.unused.reclaim_until(8) == 1 and owner.physical.unmapped_count == 4
    again = owner.create()
    assert again.row == tensors[1].row
    mapped = owner.mapping.counts.mapped
    assert grow(owner, again, 12)
    owner.wait([again])
    assert owner.mapping.counts.mapped == mapped, "the row that comes next was spared"
