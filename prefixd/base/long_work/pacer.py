"""Lets other tasks run during long work on the event loop."""

from __future__ import annotations

import asyncio

SLICE_ROWS = 1 << 13
"""Rows of numpy columns that are read in a fraction of a millisecond. Arrays of this many rows stay in the heap: first
touching new pages of memory would cost more than the work on them."""

_WORK_S = 0.004
_PAUSE_S = 0.001  # epoll cannot wait for less
_LONGEST_PAUSE_S = 0.012
_QUIET_S = 0.05


class _Gate:
    """A gate that all long work passes between its slices; it closes for a moment after every 4 ms of long work.

    One turn of the event loop between two slices is not enough for other tasks: a call takes some ten turns, since it
    waits for gRPC's own thread again and again, and gRPC takes new calls one at a time. Between slices of long work
    each of these turns takes as long as a slice; in a pause it takes a tenth of a millisecond. A pause goes on while
    calls arrive, up to three times as long as the work before it: so calls do not pile up, and long work still gets a
    quarter of the time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._open = asyncio.Event()
        self._open.set()
        self._opened_s = -_QUIET_S
        self._closed_s = 0.0
        self.arrived = False
        """True if a call has arrived since the gate last checked."""

    async def pass_through(self) -> None:
        """Waits for one turn, and while the gate is closed. After a wait it checks again: other work may have run."""
        await asyncio.sleep(0)
        while True:
            if self._open.is_set():
                now = self.loop.time()
                open_s = now - self._opened_s
                if open_s > _QUIET_S:  # this work begins only now
                    self._opened_s = now
                if not _WORK_S < open_s <= _QUIET_S:
                    return
                self._open.clear()
                self._closed_s = now
                self.arrived = False
                self.loop.call_later(_PAUSE_S, self._reopen)
            await self._open.wait()

    def _reopen(self) -> None:
        now = self.loop.time()
        if self.arrived and now - self._closed_s < _LONGEST_PAUSE_S:
            self.arrived = False
            self.loop.call_later(_PAUSE_S, self._reopen)
            return
        self._opened_s = now
        self._open.set()


_newest: _Gate | None = None
"""The gate of the event loop that was used last: a process has one loop with long work; a test's next loop gets a new
gate."""


def _gate() -> _Gate:
    global _newest
    gate, loop = _newest, asyncio.get_running_loop()
    if gate is None or gate.loop is not loop:
        gate = _newest = _Gate(loop)
    return gate


async def give_way() -> None:
    """Lets other tasks run. Long work calls it at least once in a few milliseconds."""
    await _gate().pass_through()


def call_arrived() -> None:
    """Reports that a client's message has arrived: a pause of long work then lasts longer."""
    _gate().arrived = True


class Pacer:
    """Divides work on the event loop into slices of about a millisecond.

    Work is counted and not timed, so that its slices are the same in every run.

    Args:
        per_slice: pieces of work, each of about a microsecond, after which other tasks run.
    """

    def __init__(self, per_slice: int = 1000) -> None:
        self._per_slice = per_slice
        self._done = 0

    async def worked(self, pieces: int) -> None:
        """Counts pieces of work that were done; lets other tasks run if the slice is full."""
        self._done += pieces
        if self._done >= self._per_slice:
            self._done = 0
            await give_way()
