"""What waits to be written to disk is found in slices, and given out in the order in which it came."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.cache import Trie
from prefixd.cache.index.scan import LowestRows
from prefixd.cache.index.trie import CPU, DISK, Rows
from prefixd.cache.placement.unwritten import UnwrittenBlocks
from tests.cache.index.entering import enter_block
from tests.tries import remove_row

pytestmark = pytest.mark.usefixtures("turns_by_hand")

SLICE = 8


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd.cache.index.scan.SCANNED_AT_ONCE", SLICE)
    monkeypatch.setattr("prefixd.cache.placement.unwritten.SCANNED_AT_ONCE", SLICE)
    monkeypatch.setattr("prefixd.cache.index.scan.SCANNED_AT_ONCE", SLICE)
    monkeypatch.setattr("prefixd.cache.placement.unwritten._FOUND_AT_ONCE", 16)


class Queue:
    """A trie of first blocks in the CPU tier, the last of which came first."""

    def __init__(self, blocks: int) -> None:
        self.trie = Trie(1, (1,))
        self.now = 1000.0
        for number in range(blocks):
            self.put(number, entered_s=float(blocks - number))
        self.waiting = UnwrittenBlocks(self.trie, CPU, DISK, lambda: self.now)

    def put(self, number: int, entered_s: float, parent: int = -1) -> int:
        row = enter_block(self.trie, number.to_bytes(16, "little"), number.to_bytes(4, "little"), parent)
        assert row is not None
        self.trie.put_copies(np.array([row]), CPU, np.array([[number]]), entered_s)
        return row

    def write(self, rows: Rows) -> None:
        self.trie.put_copies(rows, DISK, np.zeros((len(rows), 1), np.int64), self.now)

    def next(self, count: int) -> tuple[Rows, int]:
        """What is next, and in how many turns of the event loop it was found."""
        work = self.waiting.next(count)
        for turn in range(1, 1000):
            try:
                work.send(None)
            except StopIteration as end:
                return end.value, turn
        raise AssertionError("the search does not end")


def test_all_are_given_out_in_the_order_in_which_they_came() -> None:
    queue = Queue(40)
    order: list[int] = []
    while len(rows := queue.next(6)[0]):
        order += rows.tolist()
        queue.write(rows)
    assert order == list(range(40))[::-1]


def test_one_scan_serves_many_batches() -> None:
    queue = Queue(38)
    rows, turns = queue.next(4)
    assert turns == 5
    for _ in range(3):
        queue.write(rows)
        rows, turns = queue.next(4)
        assert (len(rows), turns) == (4, 1)
    queue.write(rows)
    assert queue.next(4)[1] == 5, "the queue was empty"


def test_tenants_take_turns_however_many_blocks_one_of_them_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd.cache.placement.unwritten._TURN", 2)
    queue = Queue(40)
    queue.waiting = UnwrittenBlocks(
        queue.trie, CPU, DISK, lambda: queue.now, owners=lambda rows: (rows < 3).astype(np.int64)
    )
    order = [queue.next(4)[0].tolist() for _ in range(3)]
    assert order == [[39, 38, 2, 1], [37, 36, 0, 35], [34, 33, 32, 31]]


def test_a_tenant_gets_its_turn_though_more_tenants_wait_than_one_scan_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan finds 16 blocks here, and each of 20 tenants has two."""
    monkeypatch.setattr("prefixd.cache.placement.unwritten._TURN", 1)
    queue = Queue(40)
    queue.waiting = UnwrittenBlocks(queue.trie, CPU, DISK, lambda: queue.now, owners=lambda rows: rows % 20)
    order: list[int] = []
    for _ in range(20):
        rows, _ = queue.next(1)
        queue.write(rows)
        order += rows.tolist()
    assert sorted(row % 20 for row in order) == list(range(20))


def test_what_has_gone_or_been_written_meanwhile_is_left_out() -> None:
    queue = Queue(40)
    assert queue.next(2)[0].tolist() == [39, 38]
    queue.write(np.array([36, 35]))
    queue.trie.drop_copies(np.array([37]), CPU)
    assert queue.next(4)[0].tolist() == [34]
    assert queue.next(4)[0].tolist() == [33, 32, 31, 30]


def test_what_could_not_be_written_comes_again() -> None:
    queue = Queue(40)
    first = queue.next(4)[0].tolist()
    queue.waiting.begin_again()
    assert queue.next(4)[0].tolist() == first


def test_a_block_is_not_given_out_before_its_parent_that_comes_during_a_scan() -> None:
    queue = Queue(40)
    queue.trie.drop_copies(np.array([0]), CPU)
    remove_row(queue.trie, 0)
    queue.write(np.arange(1, 40))
    work = queue.waiting.next(4)
    work.send(None)
    parent = queue.put(100, queue.now)
    child = queue.put(101, queue.now, parent)
    assert parent < SLICE < child, "the scan has passed the parent's row, not the child's"
    with pytest.raises(StopIteration) as end:
        while True:
            work.send(None)
    assert end.value.value.tolist() == []
    queue.now += 1
    assert queue.next(4)[0].tolist() == [parent, child]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=80), st.integers(0, 12), st.integers(1, 30))
def test_the_lowest_rows_are_those_that_a_sort_of_all_puts_first(
    offered: list[tuple[int, int]], keep: int, at_once: int
) -> None:
    scores, ties = np.array(offered, np.float64).reshape(-1, 2).T
    lowest = LowestRows(keep)
    for start in range(0, len(offered), at_once):
        some = slice(start, start + at_once)
        rows = np.arange(len(offered))[some]
        lowest.offer(rows, scores[some], ties[some].astype(np.int32))
    assert lowest.ascending().tolist() == np.lexsort((ties, scores))[:keep].tolist()
