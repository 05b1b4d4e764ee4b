"""Virtual tensors: how memory is shared, copied, kept mapped and given back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from prefixd_swap.errors import GeometryError, IntegrityError, MemoryMisuseError, OutOfMemoryError
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem import FrameId, FramePool, FrameTable, VirtualMemory, create_memory
from prefixd_swap.vtensor import VirtualTensorManager
from prefixd_swap.vtensor.virtual_set import Row
from tests.swap.conftest import used_bytes

Settle = Callable[[], None]
MAX_TOKENS = 22  # five blocks of four tokens, and half a block
REQUESTS = 3


@pytest.fixture
def pool(memory: VirtualMemory, geometry: KvGeometry) -> FramePool:
    """Frames that belong to somebody else, as the daemon's do."""
    return FramePool(memory, geometry.block_bytes, 12)


@pytest.fixture
def manager(
    pool: FramePool, geometry: KvGeometry, background: ThreadPoolExecutor | None, settle: Settle
) -> Iterator[VirtualTensorManager]:
    made = VirtualTensorManager(
        pool.memory, pool.table, geometry, requests=REQUESTS, max_tokens=MAX_TOKENS, background=background
    )
    yield made
    settle()
    made.check_integrity()
    made.close()


def take(pool: FramePool, count: int) -> list[FrameId]:
    frames = pool.allocate(count)
    assert frames is not None
    return frames


def frame_values(pool: FramePool, frame: FrameId) -> torch.Tensor:
    """A frame as numbers, as the daemon sees it in its window."""
    start = pool.span(frame).address - pool.first_address
    return pool._window.tensor((pool.frame_bytes // 4,), torch.float32, offset=start)


def test_all_requests_are_one_tensor_of_fixed_stride(manager: VirtualTensorManager, geometry: KvGeometry) -> None:
    kv, heads, dim = manager.kv, geometry.kv_heads, geometry.head_dim
    assert kv.shape == (REQUESTS, 24, geometry.layers, 2, heads, dim) and kv.dtype == torch.float32
    flat = kv.flatten(0, 1)
    assert flat.data_ptr() == kv.data_ptr(), "a kernel takes all requests as one run of tokens, without a copy"
    if geometry.layout == "token":
        assert kv.is_contiguous()
    else:
        assert flat[:, 1].is_contiguous(), "a layer's tokens of all requests lie in one run"
    tensor = manager.create()
    assert tensor.kv.data_ptr() == kv[tensor.row].data_ptr()


def test_blocks_are_appended_in_order(manager: VirtualTensorManager, pool: FramePool, settle: Settle) -> None:
    tensor = manager.create()
    assert (tensor.blocks, tensor.capacity_tokens) == (0, 0)
    every = take(pool, 6)
    scattered = [every[4], every[1], every[3]]
    manager.extend(tensor, scattered[:1])
    manager.extend(tensor, scattered[1:])
    manager.wait([tensor])
    assert not tensor.mapping
    for block, value in enumerate((1, 2, 3)):
        tensor.kv[4 * block : 4 * block + 4] = value
    assert (tensor.blocks, tensor.capacity_tokens, tensor.frames) == (3, 12, tuple(scattered))
    for frame, value in zip(scattered, (1, 2, 3), strict=True):
        assert frame_values(pool, frame).eq(value).all()
    assert manager.record(tensor, 1, 3) == tuple(scattered[1:])
    settle()
    manager.release(tensor)
    manager.poll(wait=True)
    assert [manager.physical.references(frame) for frame in scattered] == [0, 1, 1], "recorded frames stay"
    manager.check_integrity()
    manager.forget(scattered[1:])
    with pytest.raises(MemoryMisuseError, match="not all recorded"):
        manager.forget(scattered[:1])


def test_a_block_is_its_pieces_one_after_the_other(manager: VirtualTensorManager, pool: FramePool) -> None:
    """What a frame holds is what leaves the GPU tier, so its order is part of the format."""
    shape = manager.geometry
    tensor = manager.create()
    frames = take(pool, 2)
    manager.extend(tensor, frames)
    manager.wait([tensor])
    numbers = torch.arange(8 * shape.token_bytes // 4, dtype=torch.float32).view(8, *tensor.kv.shape[1:])
    tensor.kv[:8] = numbers.to(tensor.kv.device)
    block = numbers[4:8] if shape.layout == "token" else numbers[4:8].transpose(0, 1)
    assert torch.equal(frame_values(pool, frames[1]).cpu(), block.reshape(-1))


def test_a_tensor_is_used_while_later_blocks_are_being_mapped(pool: FramePool, geometry: KvGeometry) -> None:
    with ThreadPoolExecutor(1) as background:
        manager = VirtualTensorManager(
            pool.memory, pool.table, geometry, requests=1, max_tokens=MAX_TOKENS, background=background
        )
        tensor = manager.create()
        manager.extend(tensor, take(pool, 2))
        manager.wait([tensor])
        gate = threading.Event()
        background.submit(gate.wait)
        manager.extend(tensor, take(pool, 1))
        assert (tensor.usable_tokens, tensor.capacity_tokens, tensor.mapping) == (8, 12, True)
        manager.wait([tensor], 8)  # would not come back if it waited for the third block
        gate.set()
        manager.wait([tensor], 9)
        assert (tensor.usable_tokens, tensor.mapping) == (12, False)
        manager.close()


def test_blocks_that_could_not_be_mapped_never_count_as_mapped(
    pool: FramePool, geometry: KvGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for them is told, each time; a pass that used them would end the process."""
    with ThreadPoolExecutor(1) as background:
        manager = VirtualTensorManager(
            pool.memory, pool.table, geometry, requests=2, max_tokens=MAX_TOKENS, background=background
        )
        broken, other = manager.create(), manager.create()
        manager.extend(broken, take(pool, 1))
        manager.wait([broken])
        real = manager.virtual.map

        def fails(row: Row, first: int, frames: list[FrameId]) -> int:
            if row.number == broken.row:
                raise OutOfMemoryError("no mapping left")
            return real(row, first, frames)

        monkeypatch.setattr(manager.virtual, "map", fails)
        manager.extend(broken, take(pool, 2))
        manager.extend(other, take(pool, 1))
        manager.wait([broken, other], 4)  # what has been mapped before can be used, and copied
        for _ in range(2):
            with pytest.raises(OutOfMemoryError, match="no mapping left"):
                manager.wait([other, broken])
        manager.release(broken)
        manager.check_integrity()
        manager.close()


def test_a_prefix_is_shared_without_a_copy_and_counted(manager: VirtualTensorManager, pool: FramePool) -> None:
    prefix = take(pool, 2)
    one, two = manager.create(), manager.create()
    manager.match(one, prefix)
    manager.extend(one, take(pool, 1))
    manager.match(two, prefix)
    manager.extend(two, take(pool, 2))
    manager.wait([one, two])
    one.kv[:8] = 1
    one.kv[8:12] = 2
    two.kv[8:16] = 3
    assert two.kv[:8].eq(1).all(), "the prefix is the same memory"
    assert one.kv[8:12].eq(2).all(), "the rest is not"
    two.kv[3, 1, 0, 1, 2] = 9
    assert one.kv[3, 1, 0, 1, 2].item() == 9
    assert manager.is_shared(one, 1) and not manager.is_shared(one, 2)
    assert manager.physical.shared_count == 2
    assert manager.mapping.counts.copied == 0


def test_what_is_still_mapped_is_not_mapped_again(
    manager: VirtualTensorManager, pool: FramePool, settle: Settle
) -> None:
    """A chat's next turn finds its addresses as it left them."""
    chat, others = take(pool, 4), take(pool, 2)
    for frames in (chat, others):
        tensor = manager.create(frames)
        manager.extend(tensor, frames)
        manager.wait([tensor])
        settle()
        manager.release(tensor)
    assert manager.poll(wait=True) == 0
    mapped = manager.mapping.counts.mapped
    again = manager.create([*chat, *others])
    manager.match(again, chat)
    manager.wait([again])
    assert manager.mapping.counts.mapped == mapped and manager.mapping.counts.reused == 4
    manager.extend(again, others)
    manager.wait([again])
    assert manager.mapping.counts.mapped == mapped + 2
    again.kv[12:20] = 5
    assert frame_values(pool, chat[3]).eq(5).all() and frame_values(pool, others[0]).eq(5).all()
    settle()


def test_other_frames_replace_those_of_an_ended_request(
    manager: VirtualTensorManager, pool: FramePool, settle: Settle
) -> None:
    first, second = take(pool, 4), take(pool, 3)
    tensors = [manager.create() for _ in range(REQUESTS)]
    manager.extend(tensors[0], first)
    manager.wait(tensors)
    tensors[0].kv[:16] = 1
    settle()
    done: list[int] = []
    manager.release(tensors[0], on_released=lambda: done.append(manager.virtual.idle_count))
    assert done == [1]
    again = manager.create()
    assert again.row == tensors[0].row
    manager.extend(again, second)
    manager.wait([again])
    again.kv[:12] = 2
    assert all(frame_values(pool, frame).eq(1).all() for frame in first), "they are as the ended request left them"
    assert all(frame_values(pool, frame).eq(2).all() for frame in second)
    assert manager.unused.still_mapped(first) == {first[3]}, "the fourth block was not wanted, and stays for the next"
    settle()
    assert manager.unused.reclaim() == 1, "behind the last block of the row in use"
    manager.release(again)
    assert manager.unused.reclaim(second[1:2]) == 2
    assert manager.unused.still_mapped([*first, *second]) == {second[0]}
    assert manager.unused.reclaim() == 1


def test_a_fork_shares_all_and_copies_the_block_it_writes_to(
    manager: VirtualTensorManager, pool: FramePool, settle: Settle
) -> None:
    frames, spare = take(pool, 3), take(pool, 1)
    parent = manager.create()
    manager.extend(parent, frames)
    manager.wait([parent])
    parent.kv[:12] = 7
    parent.kv[10:12] = float("nan")
    child = manager.fork(parent)
    manager.wait([child])
    assert child.frames == tuple(frames) and manager.physical.shared_count == 3
    manager.writable(child, 2, spare[0], tokens=2)
    assert child.frames == (*frames[:2], spare[0])
    assert child.kv[:10].eq(7).all()
    child.kv[10] = 8
    settle()
    assert parent.kv[8:10].eq(7).all() and parent.kv[10].isnan().all()
    assert not manager.is_shared(parent, 2), "the last owner writes in place"
    with pytest.raises(MemoryMisuseError, match="shared with no other"):
        manager.writable(parent, 2, spare[0], tokens=2)
    assert manager.mapping.counts.copied == 1


def test_a_beam_becomes_another_by_mapping_where_they_differ(
    manager: VirtualTensorManager, pool: FramePool, settle: Settle
) -> None:
    prefix, own = take(pool, 3), take(pool, 3)
    one, two = manager.create(), manager.create()
    manager.extend(one, [*prefix, own[0]])
    manager.extend(two, [*prefix, own[1], own[2]])
    manager.wait([one, two])
    one.kv[12:16] = 1
    settle()
    mapped = manager.mapping.counts.mapped
    manager.assign(two, one.frames)
    manager.wait([two])
    assert two.frames == one.frames and manager.mapping.counts.mapped == mapped + 1
    assert two.kv[12:16].eq(1).all()
    assert [manager.physical.references(frame) for frame in own] == [2, 0, 0]
    settle()


def test_more_than_there_is_is_refused_and_changes_nothing(manager: VirtualTensorManager, pool: FramePool) -> None:
    tensor = manager.create()
    manager.extend(tensor, take(pool, 5))
    with pytest.raises(MemoryMisuseError, match="2 more blocks do not fit: 5 of 6"):
        manager.extend(tensor, take(pool, 2))
    for bad in (12, 99, -2):
        with pytest.raises(MemoryMisuseError, match=f"frame {bad} does not exist"):
            manager.extend(tensor, [FrameId(bad)])
    assert tensor.blocks == 5
    for _ in range(REQUESTS - 1):
        manager.create()
    with pytest.raises(OutOfMemoryError, match="all 3 virtual tensors are taken"):
        manager.create()
    manager.check_integrity()


def test_a_released_virtual_tensor_is_released_once(manager: VirtualTensorManager, settle: Settle) -> None:
    tensor = manager.create()
    manager.release(tensor)
    with pytest.raises(MemoryMisuseError, match="released already"):
        manager.release(tensor)


def test_a_block_of_several_frames_with_memory_where_it_is_needed(
    memory: VirtualMemory, background: ThreadPoolExecutor | None, settle: Settle
) -> None:
    """Layers with a window: nothing is mapped before it, what it leaves behind is given up, any frame serves."""
    geometry = KvGeometry(1, 1, 3 * memory.chunk_bytes // 32, "float32", block_tokens=4)
    pool = FramePool(memory, memory.chunk_bytes, 16)
    manager = VirtualTensorManager(
        memory, pool.table, geometry, requests=2, max_tokens=16, background=background, frames_per_block=3
    )
    frames = list(reversed(take(pool, 6)))
    tensor = manager.create()
    manager.extend(tensor, [FrameId(-1)] * 3 + frames)
    manager.wait([tensor])
    assert (tensor.blocks, tensor.capacity_tokens, tensor.usable_tokens) == (3, 12, 12)
    tensor.kv[4:12] = torch.arange(8.0, device=tensor.kv.device).view(8, 1, 1, 1, 1)
    settle()
    seen = [frame_values(pool, frame).unique().tolist() for frame in (frames[0], frames[1], frames[-1])]
    assert seen == [[0.0, 1.0], [1.0, 2.0], [6.0, 7.0]], "a frame's border may lie inside a token"
    manager.check_integrity()
    manager.pass_by(tensor, 6)
    assert tensor.blocks == 3 and tensor.frames[:6] == (-1,) * 6
    assert manager.physical.references(frames[0]) == 0 and manager.physical.references(frames[3]) == 1
    assert manager.unused.still_mapped(frames[:3]) == set(frames[:3]), "what was passed stays mapped"
    assert manager.unused.reclaim(frames[:2]) == 2, "a pass that still runs may read what lies beside them"
    assert manager.unused.still_mapped(frames[:3]) == set(frames[2:3])
    assert manager.unused.reclaim(frames[2:3]) == 1 and not manager.unused.still_mapped(frames[:3])
    assert manager.unused.still_mapped(frames[3:]) == set(frames[3:])
    assert tensor.kv[8:12, 0, 0, 0, 0].tolist() == [4.0, 5.0, 6.0, 7.0]
    manager.check_integrity()
    other = manager.create()
    manager.extend(other, frames[:3])
    manager.wait([other])
    assert other.kv[:4, 0, 0, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    manager.release(tensor)
    manager.release(other)
    settle()
    manager.poll(wait=True)
    again = manager.create([FrameId(-1)] * 6 + frames[3:])
    assert again.row == tensor.row, "where most of what is wanted is mapped, whatever lies before it"
    manager.release(again)
    settle()
    manager.close()
    with pytest.raises(GeometryError, match="layout"):
        VirtualTensorManager(
            memory,
            pool.table,
            replace(geometry, layout="layer", layers=2),
            requests=1,
            max_tokens=4,
            frames_per_block=2,
        )
    pool.close()


def test_impossible_sizes_are_refused(memory: VirtualMemory, geometry: KvGeometry) -> None:
    table = FrameTable(2)
    with pytest.raises(MemoryMisuseError, match="0 requests of 8 tokens"):
        VirtualTensorManager(memory, table, geometry, requests=0, max_tokens=8)
    odd = KvGeometry(1, 1, 100, "float16", block_tokens=3)
    with pytest.raises(GeometryError, match="block_tokens"):
        VirtualTensorManager(memory, table, odd, requests=1, max_tokens=8)
    with pytest.raises(MemoryMisuseError, match="0 chunks"):
        FrameTable(0)


def test_mappings_that_idle_rows_keep_go_before_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixd_swap.vmem.backends import host, mapping_budget

    budget = mapping_budget.MappingBudget(12)
    monkeypatch.setattr(host, "PROCESS_MAPPINGS", budget)
    geometry = KvGeometry(1, 1, 512, "float32", block_tokens=1)
    with create_memory("cpu", 4096) as memory:
        pool = FramePool(memory, geometry.block_bytes, 16)
        manager = VirtualTensorManager(memory, pool.table, geometry, requests=2, max_tokens=8)
        scattered = take(pool, 16)[::2]
        tensor = manager.create()
        manager.extend(tensor, scattered)
        manager.release(tensor)
        other = manager.create()
        assert other.row != tensor.row
        manager.extend(other, scattered[::-1])
        assert manager.unused.still_mapped(scattered) == set(scattered)
        assert not any(frame != -1 for row in manager.virtual.idle() for frame in row.mapped)
        manager.check_integrity()
        third = manager.create()
        with pytest.raises(OutOfMemoryError, match="max_map_count"):
            manager.extend(third, scattered)
        manager.check_integrity()
        manager.close()
        pool.close()


def test_integrity_sees_a_reference_that_is_lost(manager: VirtualTensorManager, pool: FramePool) -> None:
    tensor = manager.create()
    frames = take(pool, 1)
    manager.extend(tensor, frames)
    manager.wait([tensor])
    manager.physical.release(frames)
    with pytest.raises(IntegrityError, match="1 references, but 0"):
        manager.check_integrity()
    manager.physical.retain(frames)
    tensor._row.mapped[0] = FrameId(5)
    with pytest.raises(IntegrityError, match=r"maps"):
        manager.check_integrity()
    tensor._row.mapped[0] = frames[0]


def test_attention_over_a_batch_is_that_over_plain_tensors(manager: VirtualTensorManager, pool: FramePool) -> None:
    torch.manual_seed(0)
    prefix = take(pool, 2)
    lengths = (11, 14)
    requests = []
    for length in lengths:
        tensor = manager.create()
        manager.match(tensor, prefix)
        manager.extend(tensor, take(pool, -(-length // 4) - 2))
        requests.append(tensor)
    manager.wait(requests)
    requests[0].kv[:8].normal_()
    for tensor, length in zip(requests, lengths, strict=True):
        tensor.kv[8:length].normal_()
        query = torch.randn(1, 2, 1, manager.geometry.head_dim, device=tensor.kv.device)
        plain = tensor.kv[:length].clone(memory_format=torch.contiguous_format)
        for layer in range(2):
            views, copies = (
                torch.nn.functional.scaled_dot_product_attention(
                    query, kv[:length, layer, 0].transpose(0, 1)[None], kv[:length, layer, 1].transpose(0, 1)[None]
                )
                for kv in (tensor.kv, plain)
            )
            torch.testing.assert_close(views, copies, rtol=1e-4, atol=1e-4)


def test_scratch_memory_is_the_same_in_all_rows_and_nothing_of_it_stays(
    manager: VirtualTensorManager, pool: FramePool, memory: VirtualMemory, settle: Settle
) -> None:
    before = used_bytes(memory)
    with manager.virtual.scratch(REQUESTS, tokens=5):
        manager.kv[1, :8].fill_(0.0)
        manager.kv[2, 7, -1].fill_(3.0)
        assert all(manager.kv[row, 7, -1].eq(3.0).all() for row in range(REQUESTS))
        assert manager.kv[0, 6].eq(0.0).all()
        settle()
    assert used_bytes(memory) == before
    memory.check_integrity()
    tensor = manager.create()
    manager.extend(tensor, pool.allocate(2) or [])
    manager.wait([tensor])
    with pytest.raises(MemoryMisuseError, match="chunks are mapped"), manager.virtual.scratch(REQUESTS, tokens=5):
        pass
    manager.release(tensor)
