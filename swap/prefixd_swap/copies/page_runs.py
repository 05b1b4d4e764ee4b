"""Pages of a KV cache, the parts in host memory in which they are packed, and the copies that need no packing.

pages (any order)            part, packed run by run
run 0: [ b7 .. b2 .. ]       | run 0: b7 b2 | run 1: b7 b2 |
run 1: [ b7 .. b2 .. ]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from prefixd_swap.copies.strided_copies import LONGEST_PITCH, Rows

Ids = npt.NDArray[np.int64]

NO_BLOCK = -1
"""In a list of block ids: this position is not copied."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """The pages of one layer (or of one group of its heads).

    Block `b` of the engine has `nbytes` bytes at `address + b * stride`.
    """

    address: int
    stride: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackedPages:
    """Pages on the device, and the addresses of the parts in host memory.

    A part is packed run by run; within a run the blocks follow each other.
    """

    runs: Sequence[PageRun]
    ids: Ids
    """[parts, blocks a part]: the blocks, no block twice; `NO_BLOCK` leaves a place out."""
    addresses: Ids
    """[parts]: the host address of each part."""

    @property
    def part_bytes(self) -> int:
        """Bytes of one part."""
        return int(self.ids.shape[1]) * sum(run.nbytes for run in self.runs)

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return int(np.count_nonzero(self.ids != NO_BLOCK)) * sum(run.nbytes for run in self.runs)

    def in_order(self) -> PackedPages:
        """The same copies: parts by host address, so that neighbours are one copy; without parts that have no block;
        runs that follow each other in every block joined where a part has one block.

            blocks outermost, a block a part: runs of 64 KiB at 0, 64K, ... of every 2 MiB -> one run of 2 MiB
        """
        order = np.argsort(self.addresses, kind="stable")
        order = order[(self.ids[order] != NO_BLOCK).any(axis=1)]
        runs: list[PageRun] = []
        for run in self.runs:
            last = runs[-1] if runs and self.ids.shape[1] == 1 else None
            if last is not None and (last.address + last.nbytes, last.stride) == (run.address, run.stride):
                runs[-1] = PageRun(last.address, last.stride, last.nbytes + run.nbytes)
            else:
                runs.append(run)
        return PackedPages(runs, self.ids[order], self.addresses[order])

    def table(self) -> Ids:
        """[runs, 4]: address, stride and bytes of each run, and its place in a part; see page_moves.cu."""
        nbytes = np.array([run.nbytes for run in self.runs], np.int64)
        before = (np.cumsum(nbytes) - nbytes) * self.ids.shape[1]
        rows = [(run.address, run.stride) for run in self.runs]
        return np.column_stack([np.array(rows, np.int64), nbytes, before])

    def element(self) -> int:
        """The longest element of a kernel, 16, 4 or 1 bytes, that fits all pages and their places in a part."""
        common = math.gcd(self.part_bytes, *(math.gcd(run.address, run.stride, run.nbytes) for run in self.runs))
        return 16 if common % 16 == 0 else 4 if common % 4 == 0 else 1

    def without_packing(self, row_bytes: int, call_bytes: int) -> tuple[list[Rows], PackedPages | None]:
        """The copies that one strided call each can make, and the rest.

            layers outermost, blocks of a part follow each other: a row a layer    | L0 b4 b5 | L1 b4 b5 | ...
                (not where a layer's region is longer than a pitch may be, 2 GiB)
            blocks outermost: of each block a row a layer                          | L0 b4 |..| L1 b4 |..|

        Args:
            row_bytes: the shortest row.
            call_bytes: the least bytes of a call.
        """
        first, count, blocks = self.runs[0], len(self.runs), int(self.ids.shape[1])
        alike = all((run.stride, run.nbytes) == (first.stride, first.nbytes) for run in self.runs)
        steps = {after.address - run.address for run, after in pairwise(self.runs)} or {first.nbytes}
        if not alike or len(steps) > 1 or (apart := steps.pop()) < first.nbytes:
            return [], self
        width = blocks * first.nbytes
        rows: list[Rows] = []
        left = np.ones(len(self.ids), np.bool_)
        if (
            first.stride == first.nbytes
            and width >= row_bytes
            and count * width >= call_bytes
            and (count == 1 or width <= apart <= LONGEST_PITCH)
        ):
            left = (self.ids[:, 0] == NO_BLOCK) | (np.diff(self.ids, axis=1) != 1).any(axis=1)
            for block, host in zip(self.ids[~left, 0].tolist(), self.addresses[~left].tolist(), strict=True):
                device = first.address + block * first.stride
                rows.append(Rows(host, device, width, count, width, max(apart, width)))
        elif apart == first.nbytes >= row_bytes and count * first.nbytes >= call_bytes:
            left[:] = False
            parts, places = np.nonzero(self.ids != NO_BLOCK)
            devices = first.address + self.ids[parts, places] * first.stride
            hosts = self.addresses[parts] + places * first.nbytes
            for host, device in zip(hosts.tolist(), devices.tolist(), strict=True):
                rows.append(Rows(host, device, first.nbytes, count, width, first.nbytes))
        rest = PackedPages(self.runs, self.ids[left], self.addresses[left]) if left.any() else None
        return rows, rest
