"""How far a prefix is from the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Distance(IntEnum):
    """Where a prefix has to be brought from, nearest first.

    Source: "Prefix cache as long-term memory", section V.F, which knows no store that other hosts share.
    """

    GPU = 0
    CPU = 1
    DISK = 2
    REMOTE = 3
    NONE = 4

    @property
    def weight(self) -> float:
        """4 - N in equation 4 of the paper: 4 on the GPU, 3 on the CPU, 2 on disk, 1 for a prefix that is not computed
        yet; a shared store lies in the middle between the last two."""
        return _WEIGHTS[self]


_WEIGHTS = {Distance.GPU: 4.0, Distance.CPU: 3.0, Distance.DISK: 2.0, Distance.REMOTE: 1.5, Distance.NONE: 1.0}


def farthest(blocks: Iterable[Distance]) -> Distance:
    """The distance of a request: that of the farthest of the cached blocks it needs, `NONE` if it needs none.

    A request runs when its last block is up, so the farthest block decides.
    """
    return max(blocks, default=Distance.NONE)
