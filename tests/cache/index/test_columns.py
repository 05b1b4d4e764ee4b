"""Columns grow where they lie; where nothing can be reserved they are copied, and are as right."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.cache.index import columns
from prefixd.cache.index.columns import ColumnMemory, reserve_addresses, zeros
from prefixd.cache.index.trie_table import add_each

LIMITED = """
import resource
import numpy as np
from prefixd.cache.index.columns import ColumnMemory, reserve_addresses
resource.setrlimit(resource.{limit}, (8 << 30, 8 << 30))
assert reserve_addresses(1 << 20) is None
memory, column = ColumnMemory(), np.zeros(0, np.int64)
for rows in (1000, 100_000, 200_000):
    column = memory.grown("a", column, rows)
    assert len(column) == rows
    column[-1] = rows
assert column[[999, 99_999, 199_999]].tolist() == [1000, 100_000, 200_000]
"""


def nothing(nbytes: int) -> None:
    """A place without addresses to spare."""


def small_ranges(nbytes: int) -> mmap.mmap | None:
    """A place where not much can be reserved at once."""
    return reserve_addresses(nbytes) if nbytes <= 1 << 20 else None


def status_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])


def test_a_column_grows_where_it_lies() -> None:
    memory = ColumnMemory()
    short = memory.grown("a", np.zeros((0, 4), np.uint32), 10_000)
    short[:] = 7
    long = memory.grown("a", short, 40_000_000)
    assert long.ctypes.data == short.ctypes.data
    assert len(long) == 40_000_000
    assert (long[:10_000] == 7).all()
    assert not long[10_000:20_000].any()
    long[3] = 9
    assert (short[3] == 9).all(), "who still looks at the shorter column sees what is written"


def test_rows_that_are_not_used_take_no_memory() -> None:
    memory, column = ColumnMemory(), np.zeros(0, np.int64)
    before = status_bytes("VmRSS")
    for rows in (10_000, 1_000_000, 60_000_000):
        column = memory.grown("a", column, rows)
        column[rows // 2] = 1
    assert status_bytes("VmRSS") - before < 32 << 20


def test_a_column_of_planes_takes_memory_only_where_a_plane_is_written() -> None:
    memory = ColumnMemory()
    column = memory.grown("a", np.zeros((0, 3, 2), np.int64), 2_000_000, planes=True)
    before = status_bytes("VmRSS")
    column[:, 1] = 5
    assert status_bytes("VmRSS") - before < 2_000_000 * 2 * 8 * 3 // 2
    column = memory.grown("a", column, 3_000_000, planes=True)
    assert column.shape == (3_000_000, 3, 2)
    assert (column[:2_000_000].sum(axis=(0, 2)) == [0, 20_000_000, 0]).all()


def test_growing_takes_no_time() -> None:
    memory = ColumnMemory()
    column = memory.grown("a", np.zeros((0, 16), np.uint32), 1_000_000)
    column[:] = 1
    gc.collect()  # none is due in what is measured
    begin = time.thread_time()
    memory.grown("a", column, 2_000_000)
    assert time.thread_time() - begin < 0.01, "copying would take some 0.1 s"


def test_small_columns_reserve_nothing() -> None:
    memory = ColumnMemory(lambda nbytes: pytest.fail(f"reserves {nbytes} bytes for 8 KiB"))
    column = memory.grown("a", np.zeros(0, np.int64), 500)
    column[:] = 3
    assert memory.grown("a", column, 1000).tolist() == [3] * 500 + [0] * 500


@given(
    sizes=st.lists(st.integers(1, 40_000), min_size=1, max_size=6),
    reserve=st.sampled_from([reserve_addresses, small_ranges, nothing]),
    shape=st.sampled_from([(), (3,), (3, 2)]),
)
def test_every_column_keeps_what_was_written(
    sizes: list[int], reserve: columns.Reserve, shape: tuple[int, ...]
) -> None:
    memory = ColumnMemory(reserve)
    column = np.zeros((0, *shape), np.int32)
    expected = column.copy()
    for number, rows in enumerate(sorted(sizes), start=1):
        column = memory.grown("a", column, rows, planes=bool(shape))
        assert np.array_equal(column[: len(expected)], expected)
        assert not column[len(expected) :].any()
        column[len(expected) :] = number
        expected = column.copy()


def test_columns_of_one_table_lie_apart() -> None:
    memory = ColumnMemory()
    one, other = (memory.grown(name, np.zeros(0, np.int64), 100_000) for name in ("one", "other"))
    one[:] = 1
    assert not other.any()


def test_where_less_can_be_reserved_less_is_asked_for() -> None:
    asked: list[int] = []

    def reserve(nbytes: int) -> mmap.mmap | None:
        asked.append(nbytes)
        return reserve_addresses(nbytes) if nbytes < 1 << 28 else None

    column = ColumnMemory(reserve).grown("a", np.zeros(0, np.int64), 100_000)
    assert len(column) == 100_000
    assert asked == sorted(asked, reverse=True)
    assert asked[-2] >= 1 << 28 > asked[-1] >= 800_000


def test_what_was_reserved_is_given_back() -> None:
    gc.collect()  # of what other tests have left, none is given back meanwhile
    before = status_bytes("VmSize")
    memory = ColumnMemory()
    column = memory.grown("a", np.zeros(0, np.int64), 100_000)
    assert status_bytes("VmSize") - before > 1 << 28
    del memory
    column[0] = 1  # who still has the column may use it
    del column
    assert status_bytes("VmSize") - before < 1 << 28


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
@pytest.mark.slow
def test_a_limit_for_addresses_is_not_used_up(limit: str) -> None:
    subprocess.run([sys.executable, "-c", LIMITED.format(limit=limit)], check=True, timeout=60)


def test_nothing_is_reserved_where_addresses_count_as_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = tmp_path / "overcommit_memory"
    setting.write_text("2\n")
    monkeypatch.setattr(columns, "_OVERCOMMIT", setting)
    assert reserve_addresses(1 << 20) is None
    setting.unlink()
    assert reserve_addresses(1 << 20) is not None, "a /proc without the file"


def test_a_kernel_without_addresses_left_gives_none() -> None:
    assert reserve_addresses(1 << 62) is None
    assert reserve_addresses(1 << 64) is None


@pytest.mark.parametrize("count", [1, 1000, 1 << 16, 1 << 21])
def test_zeros_are_zeros(count: int) -> None:
    table = zeros(count, np.int32)
    assert table.shape == (count,)
    assert table.dtype == np.int32
    assert not table.any()
    table[-1] = 1


@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("reserve", [reserve_addresses, nothing])
def test_writing_ahead_changes_no_row(planes: bool, reserve: columns.Reserve) -> None:
    memory = ColumnMemory(reserve)
    rows, first = 2_000_000, 700_001
    column = memory.grown("a", np.zeros((0, 2), np.int32), rows, planes=planes)
    column[first - 1] = 5
    for plane in (0, 1) if planes else (None,):
        memory.write_ahead("a", first, rows, plane)
    memory.write_ahead("unknown", 0, rows)
    assert (column[first - 1] == 5).all() and not column[first:].any() and not column[: first - 1].any()


@given(st.lists(st.integers(0, 9)), st.booleans())
def test_each_row_is_counted_as_often_as_it_occurs(rows: list[int], ascending: bool) -> None:
    rows = sorted(set(rows)) if ascending else rows
    column = np.zeros(10, np.int32)
    add_each(column, np.array(rows, np.int64), 2)
    assert column.tolist() == [2 * rows.count(row) for row in range(10)]
