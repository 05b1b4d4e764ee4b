"""The tokens of a sequence in a pass, and the cells in which recurrent layers compute them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateSegment:
    """Tokens [start, stop) of one sequence, which a pass computes.

    state: the sequence's state after its first `start` tokens; the pass makes it the one after `stop`. With start 0
    there is none yet: whatever bytes the buffer has are not read. See `StateLayout` for what a buffer is.
    keep: (position, buffer): the state after `position` tokens is copied into that buffer. A position is in
    (start, stop], and a multiple of the cell or `stop`.
    """

    start: int
    stop: int
    state: torch.Tensor
    keep: Sequence[tuple[int, torch.Tensor]] = ()

    def __len__(self) -> int:
        return self.stop - self.start


def pieces(start: int, stop: int, cell_tokens: int) -> Iterator[tuple[int, int]]:
    """Cut [start, stop) at the multiples of `cell_tokens`: (40, 100) in cells of 32 is (40, 64), (64, 96), (96, 100).

    The last bits of a recurrent layer's result depend on which tokens it gets in one call. So a prompt has equal bits
    in any two computations that cut it into passes at multiples of the cell.
    """
    while start < stop:
        end = min((start // cell_tokens + 1) * cell_tokens, stop)
        yield start, end
        start = end
