"""Sizes of slots: whole memory pages of 4096 bytes, so that a slot can be mapped, and written past the page cache.

Parts that a codec has encoded have sizes of their own. Their slots have 16 sizes for each power of two, so that a page
of slots of one size serves many of them; a slot is at most a sixteenth larger than its part, above 64 KiB.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import MemoryMisuseError

PAGE_BYTES = 4096
_SIZES_SHIFT = 4  # 16 sizes of slots for each power of two


def round_to_slot(nbytes: int) -> int:
    """Bytes of the slot that holds `nbytes`: the next multiple of 4096.

    Raises:
        MemoryMisuseError: `nbytes` is not positive.
    """
    if nbytes <= 0:
        raise MemoryMisuseError(f"a slot of {nbytes} bytes was asked for; ask for at least 1")
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def coded_slot_bytes(nbytes: int) -> int:
    """Bytes of the slot that holds `nbytes` bytes of an encoded part.

    Raises:
        MemoryMisuseError: `nbytes` is not positive.
    """
    step = max(PAGE_BYTES, 1 << max(nbytes.bit_length() - 1 - _SIZES_SHIFT, 0))
    return -(-round_to_slot(nbytes) // step) * step


def coded_slots_bytes(nbytes: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """As `coded_slot_bytes`, an array of them; 0 for 0."""
    wide = nbytes.astype(np.int64)
    _, exponent = np.frexp(wide)  # 2 ** (exponent - 1) <= nbytes
    step = np.maximum(PAGE_BYTES, np.int64(1) << np.maximum(exponent.astype(np.int64) - 1 - _SIZES_SHIFT, 0))
    rounded: npt.NDArray[np.int64] = -(-wide // step) * step
    return rounded
