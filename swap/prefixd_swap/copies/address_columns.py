"""Copies of one direction as columns of addresses, which numpy makes and joins faster than Python does pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd_swap.spans import Span

Int64s = npt.NDArray[np.int64]
Pair = tuple[Span, Span]
"""Destination and source."""


@dataclass(frozen=True, slots=True, eq=False)
class AddressColumns:
    """n copies, each of `nbytes` bytes from `at` to `to`; all three [n]."""

    to: Int64s
    at: Int64s
    nbytes: Int64s
    to_device: bool = False
    from_device: bool = False

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> AddressColumns:
        """The columns of pairs of one direction and of equal sizes."""
        rows = np.array([(to.address, at.address, at.nbytes) for to, at in pairs], np.int64).reshape(-1, 3)
        sides = (pairs[0][0].on_device, pairs[0][1].on_device) if pairs else (False, False)
        return cls(rows[:, 0], rows[:, 1], rows[:, 2], *sides)

    def pairs(self) -> list[Pair]:
        """The copies as pairs of spans."""
        return [
            (Span(to, nbytes, self.to_device), Span(at, nbytes, self.from_device)) for to, at, nbytes in self.rows()
        ]

    def rows(self) -> list[tuple[int, int, int]]:
        """(to, at, nbytes) of each copy."""
        return list(zip(self.to.tolist(), self.at.tolist(), self.nbytes.tolist(), strict=True))

    def joined(self) -> AddressColumns:
        """The same bytes in fewer and longer copies: without empty ones, and with neighbours in the list joined that
        continue each other on both sides."""
        some = self.nbytes > 0
        to, at, nbytes = self.to[some], self.at[some], self.nbytes[some]
        if not len(to):
            return AddressColumns(to, at, nbytes, self.to_device, self.from_device)
        begins = np.ones(len(to), np.bool_)
        begins[1:] = (to[:-1] + nbytes[:-1] != to[1:]) | (at[:-1] + nbytes[:-1] != at[1:])
        first = np.flatnonzero(begins)
        return AddressColumns(to[first], at[first], np.add.reduceat(nbytes, first), self.to_device, self.from_device)
