"""Lets other tasks of the event loop run during long work."""

from __future__ import annotations

import asyncio

SLICE_ROWS = 1 << 13
"""Rows of numpy columns that are looked at in a fraction of a millisecond, in arrays too small to be given back to the
system: pages of memory that are touched for the first time cost more than what is done with them."""


class Pacer:
    """Divides work on the event loop into slices of about a millisecond.

    Work is counted and not timed, so that a run can be repeated.

    Args:
        per_slice: pieces of work, each of about a microsecond, after which others run.
    """

    def __init__(self, per_slice: int = 1000) -> None:
        self._per_slice = per_slice
        self._done = 0

    async def worked(self, pieces: int) -> None:
        """So many pieces of work were done. Other tasks run here when the slice is full."""
        self._done += pieces
        if self._done >= self._per_slice:
            self._done = 0
            await asyncio.sleep(0)
