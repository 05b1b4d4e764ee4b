"""Memory whose rows are padded, as the tokens of a padded stride are (`block_size`), and the same bytes packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class RowRun(NamedTuple):
    """`rows` rows of `width` bytes: where they begin in the padded memory, and where in the packed bytes."""

    padded: int
    packed: int
    width: int
    rows: int


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """`nbytes` bytes of memory with rows of `width` bytes, one every `stride` bytes. Packed, the padding is left out.

    The memory begins `offset` bytes behind the begin of a row, since a block may lie in several frames:

    ```
    stride 32, width 12, offset 8, nbytes 64

    padded   |=|/////////////////////|=====|/////////////////////|=====|///|
             0 4                     24    36                    56    64
    packed   |=|=====|====|
             0 4     16   24
    ```
    """

    stride: int
    width: int
    nbytes: int
    offset: int = 0

    @property
    def packed_bytes(self) -> int:
        """Bytes of the rows in the memory."""
        return sum(run.width * run.rows for run in self.runs())

    def runs(self) -> Iterator[RowRun]:
        """The rows: what is left of the first one, the whole ones, and as much as is there of the last one."""
        packed = 0
        rest = self.width - self.offset
        if 0 < rest < self.width:
            yield (run := RowRun(0, packed, min(rest, self.nbytes), 1))
            packed = run.width
        first = -self.offset % self.stride
        whole = max(0, -(-(self.nbytes - first - self.width + 1) // self.stride))
        if whole:
            yield RowRun(first, packed, self.width, whole)
            packed += whole * self.width
        last = first + whole * self.stride
        if last < self.nbytes:
            yield RowRun(last, packed, self.nbytes - last, 1)
