"""Where the bytes of vLLM's pages go in a part of a prefixd block."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixd.integrations.engine.copying.group_pages import NO_BLOCK, GroupPages, PageRun
from prefixd_swap.copies.page_copies import gather_pages, scatter_pages


def test_layer_by_layer_and_within_a_layer_block_by_block() -> None:
    pages = GroupPages(((PageRun(1000, 10, 10),), (PageRun(2000, 10, 10),)))
    assert pages.block_bytes == 20
    pairs = [(theirs.address, ours.address, ours.nbytes) for theirs, ours in pages.pairs(0, [7, 3])]
    assert pairs == [(1070, 0, 10), (1030, 10, 10), (2070, 20, 10), (2030, 30, 10)]


def test_one_layer_of_several_lies_where_it_lies_among_all() -> None:
    pages = GroupPages(((PageRun(1000, 16, 10),), (PageRun(2000, 16, 4), PageRun(3000, 16, 4)), (PageRun(0, 1, 1),)))
    every = list(pages.pairs(500, [1, 2, 3]))
    alone = [pair for layer in range(3) for pair in pages.pairs(500, [1, 2, 3], range(layer, layer + 1))]
    assert alone == every
    assert len({ours.address for _, ours in every}) == len(every)


def test_a_place_that_is_not_wanted_is_left_out_and_keeps_its_room() -> None:
    pages = GroupPages(((PageRun(0, 10, 10),),))
    assert [ours.address for _, ours in pages.pairs(0, [5, NO_BLOCK, 6])] == [0, 20]


def test_pages_on_a_device_say_so() -> None:
    pages = GroupPages(((PageRun(0, 10, 10),),), on_device=True)
    assert [(theirs.on_device, ours.on_device) for theirs, ours in pages.pairs(0, [1])] == [(True, False)]


@given(
    runs=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4),
    out=st.permutations(range(6)),
    back=st.permutations(range(6)),
)
def test_there_and_into_other_blocks_gives_the_same_bytes(
    runs: list[list[int]], out: list[int], back: list[int]
) -> None:
    """With any sizes of pages: all of a part is used, no byte twice."""
    stride = 16
    memory = np.random.default_rng(0).integers(0, 256, (sum(map(len, runs)), 6, stride), np.uint8)
    places = iter(range(len(memory)))
    layers = tuple(tuple(PageRun(next(places) * 6 * stride, stride, nbytes) for nbytes in layer) for layer in runs)
    pages, flat = GroupPages(layers), memory.reshape(-1)
    arena = np.zeros(4 * pages.block_bytes, np.uint8)
    written = np.zeros(len(arena), int)
    before = flat.copy()
    for theirs, ours in pages.pairs(0, out[:4]):
        arena[ours.address : ours.address + ours.nbytes] = flat[theirs.address : theirs.address + theirs.nbytes]
        written[ours.address : ours.address + ours.nbytes] += 1
    assert (written == 1).all()
    for theirs, ours in pages.pairs(0, back[:4]):
        flat[theirs.address : theirs.address + theirs.nbytes] = arena[ours.address : ours.address + ours.nbytes]
    for run in (run for layer in layers for run in layer):
        for source, target in zip(out[:4], back[:4], strict=True):
            was = before[run.address + source * stride :][: run.nbytes]
            assert np.array_equal(flat[run.address + target * stride :][: run.nbytes], was)


@given(
    runs=st.lists(st.lists(st.sampled_from([1, 4, 6, 8, 16]), min_size=1, max_size=3), min_size=1, max_size=4),
    blocks=st.integers(1, 3),
    parts=st.integers(1, 4),
    missing=st.sets(st.integers(0, 11)),
    data=st.data(),
)
def test_in_batches_as_page_by_page(
    runs: list[list[int]], blocks: int, parts: int, missing: set[int], data: st.DataObject
) -> None:
    """Both ways, of all layers and of some, byte for byte, with the kernels that run on a GPU too."""
    stride, count = 16, 16
    seed = data.draw(st.integers(0, 99))
    random = np.random.default_rng(seed)
    memory = random.integers(0, 256, (sum(map(len, runs)), count, stride), np.uint8)
    places = iter(range(len(memory)))
    layers = tuple(
        tuple(PageRun(memory.ctypes.data + next(places) * count * stride, stride, nbytes) for nbytes in layer)
        for layer in runs
    )
    pages = GroupPages(layers)
    first = data.draw(st.integers(0, len(layers) - 1))
    some = data.draw(st.sampled_from([None, range(first, len(layers))]))
    ids = random.permutation(count)[: parts * blocks].reshape(parts, blocks)
    before, chosen = pages.packed(some)
    width = blocks * sum(run.nbytes for run in chosen)
    arena = random.integers(0, 256, (parts, blocks * pages.block_bytes), np.uint8)
    at = slice(blocks * before, blocks * before + width)

    wanted = arena.copy()
    for part in range(parts):
        for theirs, ours in pages.pairs(wanted[part].ctypes.data, ids[part].tolist(), some):
            ctypes.memmove(ours.address, theirs.address, ours.nbytes)
    staged = torch.zeros((parts, width), dtype=torch.uint8)
    gather_pages(chosen, ids, staged, "cpu")
    packed = arena.copy()
    packed[:, at] = staged.numpy()
    assert np.array_equal(packed, wanted)

    ids.reshape(-1)[[place for place in missing if place < ids.size]] = NO_BLOCK
    if (ids == NO_BLOCK).all():
        return
    was = memory.copy()
    scatter_pages(chosen, ids, torch.from_numpy(arena[:, at].copy()), "cpu")
    batched, memory[:] = memory.copy(), was
    for part in range(parts):
        for theirs, ours in pages.pairs(arena[part].ctypes.data, ids[part].tolist(), some):
            ctypes.memmove(theirs.address, ours.address, ours.nbytes)
    assert np.array_equal(batched, memory)
