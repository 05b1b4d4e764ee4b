"""The key index against a dict, with keys that crowd in a few places of the table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from prefixd.cache.index.key_index import KeyIndex

# Halves of 3 bits: keys that agree in the half that is hashed, so that all of them are looked for in 8 places.
crowded = st.tuples(st.integers(0, 7), st.integers(0, 7)).map(
    lambda halves: b"".join(half.to_bytes(8, "little") for half in halves)
)
any_keys = crowded | st.binary(min_size=16, max_size=16)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = KeyIndex(1)  # no mixing: the small halves all begin at the first place
        self.rows: dict[bytes, int] = {}
        self.free: list[int] = []
        self.used = 0

    def new_row(self) -> int:
        if self.free:
            return self.free.pop()
        self.used += 1
        self.index.reserve(self.used)
        return self.used - 1

    @rule(key=any_keys)
    def insert(self, key: bytes) -> None:
        if key not in self.rows:
            self.rows[key] = self.new_row()
            self.index.insert(key, self.rows[key])

    @rule(keys=st.lists(any_keys, max_size=40, unique=True))
    def insert_all(self, keys: list[bytes]) -> None:
        new = [key for key in keys if key not in self.rows]
        rows = [self.new_row() for _ in new]
        self.index.insert_all(np.frombuffer(b"".join(new), np.uint8).reshape(-1, 16), np.array(rows, np.int64))
        self.rows.update(zip(new, rows, strict=True))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        for key in data.draw(st.lists(st.sampled_from(sorted(self.rows)), min_size=1, max_size=20, unique=True)):
            row = self.rows.pop(key)
            self.index.remove(row)
            self.free.append(row)

    @rule(key=any_keys)
    def find(self, key: bytes) -> None:
        assert self.index.find(key) == self.rows.get(key)

    @rule(keys=st.lists(any_keys, max_size=60))
    def find_all(self, keys: list[bytes]) -> None:
        keys += sorted(self.rows)
        assert self.index.find_all(b"".join(keys)).tolist() == [self.rows.get(key, -1) for key in keys]

    @invariant()
    def every_key_has_its_row(self) -> None:
        assert len(self.index) == len(self.rows)
        for key, row in self.rows.items():
            assert self.index.find(key) == row
            assert self.index.key(row) == key


def test_key_index_against_a_dict() -> None:
    run_state_machine_as_test(IndexMachine, settings=settings(max_examples=100, stateful_step_count=40))


def test_rows_come_and_go_and_the_table_stays_as_it_was() -> None:
    rng = np.random.default_rng(0)
    index = KeyIndex()
    index.reserve(200)
    keys = [rng.bytes(16) for _ in range(200)]
    for row, key in enumerate(keys):
        index.insert(key, row)
    places = len(index._table)
    for turn in range(20_000):
        row = turn % 200
        index.remove(row)
        assert index.find(keys[row]) is None
        keys[row] = rng.bytes(16)
        index.insert(keys[row], row)
    assert index.find_all(b"".join(keys)).tolist() == list(range(200))
    assert len(index._table) == places
    assert (index._table != -1).sum() == 200, "removals leave nothing behind"


def test_a_row_without_a_key_cannot_be_removed() -> None:
    index = KeyIndex()
    index.reserve(4)
    index.insert(bytes(16), 3)
    with pytest.raises(KeyError, match="row 2 has no key"):
        index.remove(2)
    index.remove(3)
    with pytest.raises(KeyError, match="row 3 has no key"):
        index.remove(3)


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
