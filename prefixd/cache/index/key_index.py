"""The key index: which row has which block key, in 24 to 32 bytes a block.

Keys stand in two columns by row; a table with open addressing (linear probing, at most half full) has the rows. There
are no tombstones: a removal moves the entries behind it up, so that years of insertions and removals cost nothing.
Where a key's search begins depends on a secret number, so nobody can choose prompts whose keys crowd in one place.
"""

from __future__ import annotations

import secrets
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16

Rows = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]

_EMPTY = -1
_FEW = 12  # keys that are looked up faster one by one than all at once
_MASK = 2**64 - 1
_HALVES = Struct("<QQ")


class KeyIndex:
    """Rows by block key. A key has one row, a row one key.

    Args:
        multiplier: the secret number, odd; a random one by default.
    """

    def __init__(self, multiplier: int | None = None) -> None:
        self._multiplier = multiplier or secrets.randbits(64) | 1
        self._count = 0
        self._low = np.zeros(1, np.uint64)
        self._high = np.zeros(1, np.uint64)
        self._make_table(16)
        self._make_views()

    def __len__(self) -> int:
        return self._count

    def reserve(self, rows: int) -> None:
        """Makes room for the keys of rows below `rows`."""
        if rows > len(self._low):
            self._low = grown(self._low, rows)
            self._high = grown(self._high, rows)
            self._make_views()

    def key(self, row: int) -> bytes:
        """The key of a row that has one."""
        return _HALVES.pack(self._lows[row], self._highs[row])

    def keys(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """[len(rows), 16]: the keys of rows that have one."""
        return np.stack([self._low[rows], self._high[rows]], axis=1).view(np.uint8)

    def find(self, key: bytes) -> int | None:
        """The row of `key`."""
        low, high = _HALVES.unpack(key)
        slots, lows, mask = self._slots, self._lows, len(self._table) - 1
        row: int
        at = (low * self._multiplier & _MASK) >> self._shift
        while (row := slots[at]) != _EMPTY:
            if lows[row] == low and self._highs[row] == high:
                return row
            at = at + 1 & mask
        return None

    def find_all(self, keys: bytes | npt.NDArray[np.uint8]) -> Rows:
        """The row of each key, -1 where there is none. `keys` is 16 bytes a key, one behind the other."""
        wanted = np.frombuffer(keys, np.uint64).reshape(-1, 2)
        if len(wanted) <= _FEW:
            found = [self.find(_HALVES.pack(low, high)) for low, high in wanted.tolist()]
            return np.array([_EMPTY if row is None else row for row in found], np.int64)
        low, high = wanted[:, 0], wanted[:, 1]
        at = self._home(low)
        rows: Rows = self._table[at].astype(np.int64)
        todo = np.flatnonzero(self._differ(rows, low, high))
        while len(todo) > _FEW:
            at[todo] = at[todo] + 1 & len(self._table) - 1
            rows[todo] = self._table[at[todo]]
            todo = todo[self._differ(rows[todo], low[todo], high[todo])]
        for place in todo.tolist():
            row = self.find(_HALVES.pack(int(low[place]), int(high[place])))
            rows[place] = _EMPTY if row is None else row
        return rows

    def insert(self, key: bytes, row: int) -> None:
        """Enters a key that is not there, for a row that has none and for which there is room (`reserve`)."""
        self._widen(self._count + 1)
        low, high = _HALVES.unpack(key)
        self._lows[row], self._highs[row] = low, high
        slots, mask = self._slots, len(self._table) - 1
        at = (low * self._multiplier & _MASK) >> self._shift
        while slots[at] != _EMPTY:
            at = at + 1 & mask
        slots[at] = row
        self._count += 1

    def insert_all(self, keys: npt.NDArray[np.uint8], rows: Rows) -> None:
        """Enters [m, 16] different keys as `insert` does."""
        self._widen(self._count + len(rows))
        halves = np.ascontiguousarray(keys).view(np.uint64)
        self._low[rows], self._high[rows] = halves[:, 0], halves[:, 1]
        self._place(rows.astype(np.int32))
        self._count += len(rows)

    def remove(self, row: int) -> None:
        """Forgets the key of a row that has one."""
        slots, lows, mask = self._slots, self._lows, len(self._table) - 1
        multiplier, shift = self._multiplier, self._shift
        hole = (lows[row] * multiplier & _MASK) >> shift
        while slots[hole] != row:
            if slots[hole] == _EMPTY:
                raise KeyError(f"row {row} has no key")
            hole = hole + 1 & mask
        at = hole
        while (other := slots[at := at + 1 & mask]) != _EMPTY:
            home = (lows[other] * multiplier & _MASK) >> shift
            if at - home & mask >= at - hole & mask:  # its search passes the hole
                slots[hole] = other
                hole = at
        slots[hole] = _EMPTY
        self._count -= 1

    def _home(self, low: Uint64s) -> Rows:
        """Where the searches begin."""
        places: Rows = ((low * np.uint64(self._multiplier)) >> np.uint64(self._shift)).view(np.int64)
        return places

    def _differ(self, rows: Rows, low: Uint64s, high: Uint64s) -> npt.NDArray[np.bool_]:
        """Which searches must go on: the rows found are other keys'."""
        differ: npt.NDArray[np.bool_] = (self._low[rows] != low) | (self._high[rows] != high)
        differ &= rows != _EMPTY
        return differ

    def _widen(self, count: int) -> None:
        """Keeps the table at most half full with `count` keys."""
        if 2 * count <= len(self._table):
            return
        rows = self._table[self._table != _EMPTY]
        self._make_table(1 << (2 * count - 1).bit_length())
        self._place(rows)

    def _place(self, rows: npt.NDArray[np.int32]) -> None:
        """Enters rows in the table, all at once: of those that meet at an empty place one stays, the others go on."""
        at = self._home(self._low[rows])
        while len(rows):
            empty = self._table[at] == _EMPTY
            self._table[at[empty]] = rows[empty]
            left = self._table[at] != rows
            rows, at = rows[left], at[left] + 1 & len(self._table) - 1

    def _make_table(self, places: int) -> None:
        self._table = np.full(places, _EMPTY, np.int32)
        self._shift = 65 - places.bit_length()
        self._slots: memoryview[int] = self._table.data  # several times faster than numpy for one value

    def _make_views(self) -> None:
        self._lows: memoryview[int] = self._low.data
        self._highs: memoryview[int] = self._high.data


def grown(column: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """`column` with `rows` rows, the new ones 0. They take no memory before something is written there."""
    new = np.zeros((rows, *column.shape[1:]), column.dtype)
    new[: len(column)] = column
    return new
