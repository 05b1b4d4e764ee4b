"""Lets other tasks of the event loop run during long work."""

from __future__ import annotations

import asyncio

_SLICE_ROWS = 8192
_CALL_ROWS = 64


class Pacer:
    """Divides work on the event loop into slices of about a millisecond, measured in trie rows looked at.

    Work is counted and not timed, so that a run can be repeated.
    """

    def __init__(self) -> None:
        self._rows = 0

    async def worked(self, rows: int) -> None:
        """A piece of work on so many rows was done. Other tasks run here when the slice is full."""
        self._rows += rows + _CALL_ROWS
        if self._rows >= _SLICE_ROWS:
            self._rows = 0
            await asyncio.sleep(0)
