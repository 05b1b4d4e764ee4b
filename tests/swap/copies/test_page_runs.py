"""How pages and parts are listed as copies, on plain addresses."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixd_swap.copies import page_copies
from prefixd_swap.copies.page_runs import NO_BLOCK, PackedPages, PageRun
from prefixd_swap.copies.strided_copies import Rows, evenly_spaced

KIB = 1 << 10


def moved(rows: list[Rows]) -> list[tuple[int, int, int]]:
    """(host, device, bytes) of each row."""
    return [
        (each.host + row * each.host_pitch, each.device + row * each.device_pitch, each.width)
        for each in rows
        for row in range(each.rows)
    ]


@given(steps=st.lists(st.sampled_from([10, 20, 30, 1 << 31]), max_size=12), first=st.integers(0, 99))
def test_rows_of_one_pitch_cover_each_address_once(steps: list[int], first: int) -> None:
    addresses = first + np.cumsum([0, *steps])
    found = []
    for at, count, pitch in evenly_spaced(addresses, 10):
        assert 10 <= pitch < 1 << 31
        found += [int(addresses[at]) + row * pitch for row in range(count)]
    assert found == addresses.tolist()


def test_the_longest_rows_are_found() -> None:
    assert list(evenly_spaced(np.array([0, 10, 20, 50, 80]), 10)) == [(0, 3, 10), (3, 2, 30)]
    assert list(evenly_spaced(np.array([0]), 10)) == [(0, 1, 10)]
    assert list(evenly_spaced(np.arange(0, 500, 20), 10)) == [(0, 25, 20)]


def test_with_layers_outermost_a_part_of_blocks_that_follow_each_other_is_one_strided_copy() -> None:
    """Two layers of pages of 64 KiB, 1 MiB apart: a row a layer. The other part's blocks do not follow each other."""
    runs = [PageRun(layer << 20, 64 * KIB, 64 * KIB) for layer in range(2)]
    packed = PackedPages(runs, np.array([[4, 5], [7, 6]]), np.array([1 << 30, 1 << 31]))
    rows, rest = packed.without_packing(128 * KIB, 256 * KIB)
    assert rows == [Rows(1 << 30, 256 * KIB, 128 * KIB, 2, 128 * KIB, 1 << 20)]
    assert rest is not None and rest.ids.tolist() == [[7, 6]] and rest.addresses.tolist() == [1 << 31]
    for short in ((129 * KIB, 1), (1, 257 * KIB)):
        rows, rest = packed.without_packing(*short)
        assert not rows and rest is not None and len(rest.ids) == 2, "rows or calls are too short"
    far = PackedPages([PageRun(layer << 31, 64 * KIB, 64 * KIB) for layer in range(2)], packed.ids, packed.addresses)
    rows, rest = far.without_packing(1, 1)
    assert not rows and rest is not None and len(rest.ids) == 2, "the driver takes no pitch of 2 GiB"


def test_with_blocks_outermost_each_block_is_one_strided_copy() -> None:
    """A block has the pages of both layers side by side, and in a part they lie two pages apart."""
    runs = [PageRun(layer * 64 * KIB, 128 * KIB, 64 * KIB) for layer in range(2)]
    packed = PackedPages(runs, np.array([[9, 3], [NO_BLOCK, 1]]), np.array([0, 1 << 20]))
    rows, rest = packed.without_packing(64 * KIB, 128 * KIB)
    assert (
        rest is None
        and [(each.rows, each.host_pitch, each.device_pitch) for each in rows] == [(2, 128 * KIB, 64 * KIB)] * 3
    )
    page = 64 * KIB
    assert moved(rows) == [
        (0, 18 * page, page),
        (2 * page, 19 * page, page),
        (page, 6 * page, page),
        (3 * page, 7 * page, page),
        ((1 << 20) + page, 2 * page, page),
        ((1 << 20) + 3 * page, 3 * page, page),
    ]


def test_with_a_block_a_part_the_layers_of_a_block_are_one_run() -> None:
    runs = [PageRun(layer * 64, 192, 64) for layer in range(2)] + [PageRun(9000, 192, 64)]
    packed = PackedPages(runs, np.array([[9], [NO_BLOCK], [3]]), np.array([50, 60, 40])).in_order()
    assert packed.runs == [PageRun(0, 192, 128), PageRun(9000, 192, 64)]
    assert packed.ids.tolist() == [[3], [9]] and packed.addresses.tolist() == [40, 50]
    assert packed.element() == 4 and packed.table().tolist() == [[0, 192, 128, 0], [9000, 192, 64, 128]]


def test_the_compiled_kernel_is_that_of_the_source() -> None:
    folder = Path(page_copies.__file__).parent
    digest = hashlib.sha256((folder / "page_moves.cu").read_bytes()).hexdigest()
    assert digest in (folder / "page_moves.ptx").read_text().splitlines()[0], "run swap/compile_kernels.py"
