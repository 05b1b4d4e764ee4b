"""How far a prefix is from the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Distance(IntEnum):
    """The N of Relaxed-FPF: the GPU is 0, the CPU 1, the disk 2 and a prefix not computed yet 3.

    Source: "Prefix cache as long-term memory", section V.F.
    """

    GPU = 0
    CPU = 1
    DISK = 2
    NONE = 3


def farthest(blocks: Iterable[Distance]) -> Distance:
    """The distance of a request: that of the farthest of the cached blocks it needs, `NONE` if it needs none.

    A request runs when its last block is up, so the farthest block decides.
    """
    return max(blocks, default=Distance.NONE)
