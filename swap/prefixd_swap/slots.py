"""Sizes of slots: whole memory pages of 4096 bytes, so that a slot can be mapped, and written past the page cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import MemoryMisuseError

PAGE_BYTES = 4096


def round_to_slot(nbytes: int) -> int:
    """Bytes of the slot that holds `nbytes`: the next multiple of 4096.

    Raises:
        MemoryMisuseError: `nbytes` is not positive.
    """
    if nbytes <= 0:
        raise MemoryMisuseError(f"a slot of {nbytes} bytes was asked for; ask for at least 1")
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def round_to_slots(nbytes: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """As `round_to_slot`, [n] of them; 0 for 0."""
    rounded: npt.NDArray[np.int64] = -(-nbytes.astype(np.int64) // PAGE_BYTES) * PAGE_BYTES
    return rounded
