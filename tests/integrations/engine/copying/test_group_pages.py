"""Where the bytes of vLLM's pages go in a part of a prefixd block."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixd.integrations.engine.copying.group_pages import NO_BLOCK, GroupPages, PageRun


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
    runs=st.lists(st.lists(st.integers(1, 16), min_size=1, max_size=3), min_size=1, max_size=4),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    missing=st.sets(st.integers(0, 11)),
    data=st.data(),
)
def test_in_batches_as_page_by_page(
    runs: list[list[int]], shape: tuple[int, int], missing: set[int], data: st.DataObject
) -> None:
    """The runs and the addresses for `PackedPages`, of all layers and of some, name the pairs that `pairs` lists."""
    places = iter(range(100))
    pages = GroupPages(tuple(tuple(PageRun(1000 * next(places), 16, each) for each in layer) for layer in runs))
    first = data.draw(st.integers(0, len(runs) - 1))
    some = data.draw(st.sampled_from([None, range(first, len(runs))]))
    ids = np.random.default_rng(0).permutation(16)[: shape[0] * shape[1]].reshape(shape)
    ids.reshape(-1)[[place for place in missing if place < ids.size]] = NO_BLOCK
    before, chosen = pages.packed(some)
    listed, wanted = [], []
    for part, row in enumerate(ids.tolist()):
        address = 10_000 * part
        wanted += [(theirs.address, ours.address, ours.nbytes) for theirs, ours in pages.pairs(address, row, some)]
        at = address + before * len(row)
        for run in chosen:
            for place, block in enumerate(row):
                if block != NO_BLOCK:
                    listed.append((run.address + block * run.stride, at + place * run.nbytes, run.nbytes))
            at += run.nbytes * len(row)
    assert listed == wanted
