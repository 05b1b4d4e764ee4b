"""Copies of evenly spaced rows as columns of addresses: memory with padding on one side, packed bytes on the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from prefixd_swap.copies.address_columns import AddressColumns, Int64s
from prefixd_swap.padded_rows import PaddedRows


@dataclass(frozen=True, slots=True, eq=False)
class RowColumns:
    """n copies of `rows` rows each, from `at` to `to`, both [n].

    A row has `width` bytes; the next one begins `from_pitch` bytes, or `to_pitch` bytes, behind it.
    """

    to: Int64s
    at: Int64s
    width: int
    rows: int
    to_pitch: int
    from_pitch: int
    to_device: bool = False
    from_device: bool = False

    @classmethod
    def pack(cls, columns: AddressColumns, part: PaddedRows) -> Iterator[RowColumns]:
        """Copies of padded memory at `columns.at` to packed bytes at `columns.to`."""
        for run in part.runs():
            to, at = columns.to + run.packed, columns.at + run.padded
            yield cls(to, at, run.width, run.rows, run.width, part.stride, columns.to_device, columns.from_device)

    @classmethod
    def unpack(cls, columns: AddressColumns, part: PaddedRows) -> Iterator[RowColumns]:
        """Copies of packed bytes at `columns.at` to padded memory at `columns.to`; the padding stays as it is."""
        for run in part.runs():
            to, at = columns.to + run.padded, columns.at + run.packed
            yield cls(to, at, run.width, run.rows, part.stride, run.width, columns.to_device, columns.from_device)

    def joined(self) -> Iterator[RowColumns]:
        """The same rows in fewer copies: neighbours in the list that continue each other on both sides are one."""
        goes_on = np.diff(self.to) == self.rows * self.to_pitch
        goes_on &= np.diff(self.at) == self.rows * self.from_pitch
        first = np.flatnonzero(np.append(len(self.to) > 0, ~goes_on))
        counts = np.diff(np.append(first, len(self.to)))
        for count in np.unique(counts).tolist():
            some = first[counts == count]
            yield replace(self, to=self.to[some], at=self.at[some], rows=count * self.rows)

    def flat(self) -> AddressColumns:
        """A copy for each row."""
        rows = np.arange(self.rows)
        to, at = self.to[:, None] + rows * self.to_pitch, self.at[:, None] + rows * self.from_pitch
        nbytes = np.full(to.size, self.width, np.int64)
        return AddressColumns(to.ravel(), at.ravel(), nbytes, self.to_device, self.from_device)
