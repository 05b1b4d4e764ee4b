"""Chooses the size of large pages.

Every slot size of a tier should fill a page without a rest, so the page is the least common multiple of the sizes
(Jenga, section 4.2) if that is at most 1/64 of the capacity. Otherwise it is a bounded size with a small rest. Pages
begin and end at *units*, a power of two that depends on the capacity alone, so the page size may change while slots are
taken: free space is cut again, taken slots stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from prefixd_swap.slots import PAGE_BYTES

MAX_UNITS = 1 << 16
"""A tier has at most about this many units, so that tables by unit stay small and fast to scan."""
MAX_PAGES = 1 << 14
SHARE = 64
"""A page is at most this part of the capacity, unless one slot is larger than that."""
_LEAST_BYTES = 64 << 10
_LEAST_SHARE = 256
_CANDIDATES = 1024


def unit_bytes(capacity_bytes: int) -> int:
    """The unit of a tier: the least power of two, 4096 or more, that divides the capacity into at most 65,536 units."""
    return 1 << (max(PAGE_BYTES, -(-capacity_bytes // MAX_UNITS)) - 1).bit_length()


def choose_page_bytes(sizes: Collection[int], capacity_bytes: int, now: int = 1) -> int:
    """Bytes of a page for slots of `sizes` (multiples of 4096, none above the capacity): whole units.

    - At least 64 KiB and 1/16384 of the capacity, so that pages are few; in a small tier 1/256 of the capacity instead
      of 64 KiB.
    - The least common multiple of all sizes and the unit that has this minimum, if it is at most 1/64 of the capacity;
      a multiple of `now` too, if that is also at most 1/64.
    - Otherwise the size with the smallest loss, among sizes up to 1/64 of the capacity, or up to twice the largest slot
      if that is more. The loss is the largest rest of a page plus, for each size, one page half used.

    Args:
        now: bytes of the present pages that have slots; a multiple of it keeps them within new pages.
    """
    unit = unit_bytes(capacity_bytes)
    limit = capacity_bytes // SHARE
    least = max(unit, min(_LEAST_BYTES, capacity_bytes // _LEAST_SHARE), capacity_bytes // MAX_PAGES)
    common = unit
    for size in sizes:
        common = math.lcm(common, size)
        if common > limit:
            break
    else:
        page = -(-least // common) * common
        return math.lcm(page, now) if math.lcm(page, now) <= limit else page
    largest = max(sizes, default=unit)
    first = -(-max(largest, least) // unit)
    last = max(first, min(max(limit, 2 * largest), capacity_bytes) // unit)
    step = -(-(last - first + 1) // _CANDIDATES)
    candidates = np.arange(first, last + 1, step, dtype=np.int64) * unit
    rest = np.zeros(len(candidates), np.int64)
    for size in sizes:
        np.maximum(rest, candidates % size, out=rest)
    loss = rest / candidates + len(sizes) * candidates / (2 * capacity_bytes)
    return int(candidates[np.argmin(loss)])
