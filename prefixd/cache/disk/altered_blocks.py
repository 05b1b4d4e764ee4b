"""Drops blocks on disk that a lossy codec has altered where the settings do not want them any more, at the start.

A namespace is stored exactly, or without loss, from now on: then its blocks are exact, also those that were stored when
another codec was chosen. The same holds for a bound of errors that was lowered.

An altered block loses its bytes, and nothing else is dropped: where exact blocks continue it, its record stays without
bytes. They are of use again once the block has been computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd_swap import Records

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class AlteredBlocks:
    """Altered blocks that are not wanted. [n] each, over all records.

    Attributes:
        gone: those that leave the index.
        bare: those whose record stays without bytes.
    """

    gone: Bools
    bare: Bools

    def __len__(self) -> int:
        return int(np.count_nonzero(self.gone | self.bare))


def find_altered(
    records: Records,
    sound: Bools,
    levels: Callable[[], Sequence[npt.NDArray[np.int64]]],
    most_errors: npt.NDArray[np.float32],
) -> AlteredBlocks:
    """The sound blocks whose error is above what their namespace allows.

    Args:
        records: the blocks on disk.
        sound: [n]: which of them can be entered.
        levels: returns the records of each depth.
        most_errors: [namespaces]: the largest RMS error that each allows; 0: its blocks are exact.
    """
    altered = np.zeros(len(records), np.bool_)
    for group in records.groups:
        if group.errors is not None and any(group.part_bytes):
            most = most_errors[records.namespace[group.rows]]
            altered[group.rows] = (group.errors[:, 0] > 0) & ((group.errors[:, 1] > most) | (most == 0))
    altered &= sound
    continued = np.zeros(len(records), np.bool_)  # blocks behind them keep their bytes
    for rows in reversed(levels()) if altered.any() else ():
        stays = continued[rows] | (sound[rows] & ~altered[rows])
        above = records.parent[rows[stays]]
        continued[above[above >= 0]] = True
    return AlteredBlocks(altered & ~continued, altered & continued)
