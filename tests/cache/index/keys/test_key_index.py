"""The key index against a dict, with keys that crowd in a few places of tables that grow all the time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixd.cache.index.keys.key_hash import KeyHash
from prefixd.cache.index.keys.key_index import KeyIndex


def crowding_hash(places: int) -> KeyHash:
    """A hash with few values: the lowest, the highest and some between, so that searches run on and around the end."""
    rng = np.random.default_rng(places)
    values = np.linspace(0, 2**32 - 1, places).astype(np.uint32)
    tables = np.zeros((3, 2048), np.uint32)
    tables[0] = rng.choice(values, 2048)
    return KeyHash(rng.integers(0, 2**64, 4, np.uint64), tables)


keys = st.integers(0, 200).map(lambda number: number.to_bytes(16, "little")) | st.binary(min_size=16, max_size=16)


def insert(index: KeyIndex, key: bytes, row: int) -> None:
    index.insert_all(np.frombuffer(key, np.uint8)[None], np.array([row]))


class IndexMachine(RuleBasedStateMachine):
    """The slowest pace, so that a table is hardly left before the next one is half full."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[bytes, int] = {}
        self.free: list[int] = []
        self.used = 0

    @initialize(places=st.sampled_from([2, 8, 1024]))
    def start(self, places: int) -> None:
        self.index = KeyIndex(crowding_hash(places), pace=4)

    def new_row(self) -> int:
        if self.free:
            return self.free.pop()
        self.used += 1
        self.index.reserve(self.used)
        return self.used - 1

    @rule(key=keys)
    def insert(self, key: bytes) -> None:
        if key not in self.rows:
            self.rows[key] = self.new_row()
            insert(self.index, key, self.rows[key])

    @rule(keys=st.lists(keys, max_size=40, unique=True))
    def insert_all(self, keys: list[bytes]) -> None:
        new = [key for key in keys if key not in self.rows]
        rows = [self.new_row() for _ in new]
        self.index.insert_all(np.frombuffer(b"".join(new), np.uint8).reshape(-1, 16), np.array(rows, np.int64))
        self.rows.update(zip(new, rows, strict=True))

    def some_keys(self, data: st.DataObject) -> list[bytes]:
        return data.draw(st.lists(st.sampled_from(sorted(self.rows)), min_size=1, max_size=20, unique=True))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        for key in self.some_keys(data):
            row = self.rows.pop(key)
            self.index.remove_all(np.array([row]))
            self.free.append(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def remove_all(self, data: st.DataObject) -> None:
        rows = [self.rows.pop(key) for key in self.some_keys(data)]
        self.index.remove_all(np.array(rows, np.int64))
        self.free += rows

    @precondition(lambda self: self.rows and self.free)
    @rule()
    def remove_all_with_a_row_that_has_no_key(self) -> None:
        with pytest.raises(KeyError, match=f"row {self.free[-1]} has no key"):
            self.index.remove_all(np.array([*self.rows.values(), self.free[-1]], np.int64))

    @rule(key=keys)
    def find(self, key: bytes) -> None:
        assert self.index.find(key) == self.rows.get(key)

    @rule(keys=st.lists(keys, max_size=60))
    def find_all(self, keys: list[bytes]) -> None:
        keys += sorted(self.rows)
        assert self.index.find_all(b"".join(keys)).tolist() == [self.rows.get(key, -1) for key in keys]

    @invariant()
    def every_key_has_its_row(self) -> None:
        assert len(self.index) == len(self.rows)
        for key, row in self.rows.items():
            assert self.index.find(key) == row
            assert self.index.key(row) == key


@pytest.mark.slow
def test_key_index_against_a_dict() -> None:
    run_state_machine_as_test(IndexMachine, settings=settings(max_examples=100, stateful_step_count=40))


def test_rows_come_and_go_and_the_table_stays_as_it_was() -> None:
    rng = np.random.default_rng(0)
    index = KeyIndex()
    index.reserve(200)
    keys = [rng.bytes(16) for _ in range(200)]
    for row, key in enumerate(keys):
        insert(index, key, row)
    places = len(index._table)
    for turn in range(20_000):
        row = turn % 200
        index.remove_all(np.array([row]))
        assert index.find(keys[row]) is None
        keys[row] = rng.bytes(16)
        insert(index, keys[row], row)
    assert index.find_all(b"".join(keys)).tolist() == list(range(200))
    assert len(index._table) == places
    assert np.count_nonzero(index._table.entries) == 200, "removals leave nothing behind"


def test_a_row_without_a_key_cannot_be_removed() -> None:
    index = KeyIndex()
    index.reserve(4)
    insert(index, bytes(16), 3)
    with pytest.raises(KeyError, match="row 2 has no key"):
        index.remove_all(np.array([2]))
    index.remove_all(np.array([3]))
    with pytest.raises(KeyError, match="row 3 has no key"):
        index.remove_all(np.array([3]))


@pytest.mark.parametrize("count", [1, 12, 13, 5000])
def test_many_keys_at_once_are_found_as_one_by_one(count: int) -> None:
    rng = np.random.default_rng(count)
    keys = rng.integers(0, 256, (2 * count, 16), np.uint8)
    rows = rng.permutation(count)
    index = KeyIndex()
    index.reserve(count)
    index.insert_all(keys[:count], rows)
    assert index.find_all(keys).tolist() == [*rows.tolist(), *[-1] * count]
    assert [index.find(key.tobytes()) for key in keys] == [*rows.tolist(), *[None] * count]
    assert np.array_equal(index.keys(rows), keys[:count])


@pytest.mark.slow
def test_keys_that_come_around_the_end_are_found_while_a_table_is_left() -> None:
    """Their entries reach into the part that has been left, and beyond it."""
    tables = np.zeros((3, 2048), np.uint32)
    tables[0] = np.linspace(0, 2**32 - 1, 2048)  # small numbers as keys, in the order of the places
    index = KeyIndex(KeyHash(np.array([1 << 31, 0, 0, 0], np.uint64), tables))
    index.reserve(1000)
    last = [number.to_bytes(8, "little") + bytes([other]) * 8 for number in (2046, 2047) for other in range(200)]
    first = [number.to_bytes(8, "little") + bytes(8) for number in range(0, 2000, 16)]
    rows: dict[bytes, int] = {}
    for key in first + last:
        rows[key] = len(rows)
        insert(index, key, rows[key])
        assert index.find_all(b"".join(rows)).tolist() == list(range(len(rows)))


def test_no_insertion_rebuilds_the_table() -> None:
    """The places that are moved in one call are bounded by the keys that enter, whatever the size of the table."""
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 256, (300_000, 16), np.uint8)
    index = KeyIndex()
    index.reserve(len(keys))
    index.insert_all(keys[:262_000], np.arange(262_000))
    left = moved = 0
    for start in range(262_000, 300_000, 1000):
        index.insert_all(keys[start : start + 1000], np.arange(start, start + 1000))
        before, moved = moved, 0 if index._old is None else index._old._moved
        left += index._old is not None
        assert moved - before < 8000
    assert left > 30, "the table of a million places was filled in many calls"
    assert index.find_all(keys).tolist() == list(range(300_000))
