"""Copies between memory with padded rows and packed bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd_swap.copies.address_columns import AddressColumns
from prefixd_swap.copies.copy_engine import CopyEngine, create_copy_engine
from prefixd_swap.copies.row_columns import RowColumns
from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.padded_rows import PaddedRows
from prefixd_swap.spans import Span
from prefixd_swap.vmem import VirtualMemory

PARTS = st.integers(1, 40).flatmap(
    lambda stride: st.builds(
        PaddedRows, st.just(stride), st.integers(1, stride), st.integers(1, 200), st.integers(0, stride - 1)
    )
)


def is_row(part: PaddedRows) -> npt.NDArray[np.bool_]:
    """Which bytes of the padded memory belong to rows, by definition."""
    flags: npt.NDArray[np.bool_] = (np.arange(part.nbytes) + part.offset) % part.stride < part.width
    return flags


@settings(max_examples=200, deadline=None)
@given(PARTS)
def test_packed_are_the_bytes_of_the_rows_in_order(part: PaddedRows) -> None:
    padded = np.arange(part.nbytes)
    packed = np.full(part.packed_bytes, -1)
    runs = list(part.runs())
    assert len(runs) <= 3
    for run in runs:
        for row in range(run.rows):
            to, at = run.packed + row * run.width, run.padded + row * part.stride
            packed[to : to + run.width] = padded[at : at + run.width]
    assert packed.tolist() == padded[is_row(part)].tolist()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 7]), max_size=8),
    *(st.integers(1, 4), st.integers(1, 9), st.integers(0, 3), st.integers(0, 3)),
)
def test_neighbours_that_continue_each_other_are_one_copy(
    gaps: list[int], rows: int, width: int, to_padding: int, from_padding: int
) -> None:
    """A gap of 0: the next copy continues the one before; 7: on one side alone."""
    to_pitch, from_pitch = width + to_padding, width + from_padding
    to, at = [0], [1000]
    for gap in gaps:
        to.append(to[-1] + rows * to_pitch + gap * (gap != 7))
        at.append(at[-1] + rows * from_pitch + gap)
    columns = RowColumns(np.array(to), np.array(at), width, rows, to_pitch, from_pitch)
    joined = list(columns.joined())
    assert sum(len(each.to) for each in joined) == 1 + sum(gap > 0 for gap in gaps)
    apart = [row for each in joined for row in each.flat().rows()]
    assert sorted(apart) == columns.flat().rows()
    assert not list(RowColumns(*np.zeros((2, 0), np.int64), width, rows, to_pitch, from_pitch).joined())


@pytest.fixture
def engine(device: str) -> Iterator[CopyEngine]:
    created = create_copy_engine(device, threads=2)
    yield created
    created.close()


@pytest.mark.parametrize("offset", [0, 700, 5000], ids=["at a row", "in a row", "in padding"])
async def test_rows_come_back_and_padding_stays(engine: CopyEngine, memory: VirtualMemory, offset: int) -> None:
    """Two parts of a chunk each, packed into adjacent bytes, and unpacked into two other chunks."""
    size = memory.chunk_bytes
    part = PaddedRows(8192, 3072, size, offset)
    mapped = memory.reserve(4 * size)
    mapped.map(0, memory.create(4))
    base, device = mapped.span(0, size).address, memory.on_device
    source = np.random.default_rng(1).integers(0, 256, 2 * size, np.uint8)
    packed, found = np.zeros(2 * part.packed_bytes, np.uint8), np.zeros(2 * size, np.uint8)
    await engine.copy([(mapped.span(0, 2 * size), Span(source.ctypes.data, 2 * size))])
    await engine.copy([(mapped.span(2 * size, 2 * size), Span(found.ctypes.data, 2 * size))])
    slots = packed.ctypes.data + part.packed_bytes * np.arange(2)
    frames, others = base + size * np.arange(2), base + size * np.arange(2, 4)
    each = np.zeros(2, np.int64)
    await engine.copy_rows(list(RowColumns.pack(AddressColumns(slots, frames, each, False, device), part)))
    rows = np.tile(is_row(part), 2)
    assert np.array_equal(packed, source[rows])
    await engine.copy_rows(list(RowColumns.unpack(AddressColumns(others, slots, each, device, False), part)))
    await engine.copy([(Span(found.ctypes.data, 2 * size), mapped.span(2 * size, 2 * size))])
    assert np.array_equal(found, np.where(rows, source, 0))
    await engine.copy_rows([])


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
async def test_all_rows_of_a_copy_are_one_call_of_the_driver(
    engine: Any, memory: VirtualMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = PaddedRows(32768, 12288, memory.chunk_bytes)
    mapped = memory.reserve(memory.chunk_bytes)
    mapped.map(0, memory.create(1))
    packed = np.zeros(part.packed_bytes, np.uint8)
    to, at = np.array([packed.ctypes.data]), np.array([mapped.span(0, 1).address])
    calls: list[str] = []
    call = engine._cuda.call
    monkeypatch.setattr(engine._cuda, "call", lambda name, *given: (calls.append(name), call(name, *given))[1])
    copies = list(RowColumns.pack(AddressColumns(to, at, to, False, True), part))
    await engine.copy_rows(copies)
    assert [name for name in calls if name.startswith("cuMemcpy")] == ["cuMemcpy2DAsync"]
    engine.close()
    with pytest.raises(MemoryMisuseError, match="closed"):
        await engine.copy_rows(copies)
