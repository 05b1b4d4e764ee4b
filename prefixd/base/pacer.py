"""Lets others run during long work on the event loop."""

from __future__ import annotations

import asyncio

SLICE_ROWS = 1 << 13
"""Rows of numpy columns that are looked at in a fraction of a millisecond, in arrays too small to be given back to the
system: pages of memory that are touched for the first time cost more than what is done with them."""

_WORK_S = 0.004
_PAUSE_S = 0.001  # epoll cannot wait for less
_LONGEST_PAUSE_S = 0.012
_QUIET_S = 0.05


class _Gate:
    """Closed for a moment after every few milliseconds of long work, for all who do long work together.

    One turn of the event loop is not enough for others: a call takes some ten turns, since it waits for gRPC's own
    thread again and again, and gRPC takes new calls one at a time. Between the slices of long work each of these turns
    takes as long as a slice; in a pause, a tenth of a millisecond. A pause goes on while calls arrive, up to three
    times the work before it: then they do not pile up, and long work still has a quarter of the time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._open = asyncio.Event()
        self._open.set()
        self._opened_s = -_QUIET_S
        self._closed_s = 0.0
        self.arrived = False
        """A call has arrived since somebody looked."""

    async def pass_through(self) -> None:
        """Waits for one turn, and while the gate is closed. Who waited looks again: others may have worked since."""
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
"""A process has one event loop that does long work. Where it has another, as in tests, that gets a gate of its own."""


def _gate() -> _Gate:
    global _newest
    gate, loop = _newest, asyncio.get_running_loop()
    if gate is None or gate.loop is not loop:
        gate = _newest = _Gate(loop)
    return gate


async def give_way() -> None:
    """Others run here. Long work calls it at least once in a few milliseconds."""
    await _gate().pass_through()


def call_arrived() -> None:
    """Tells that a client's message is here: long work that pauses now goes on later."""
    _gate().arrived = True


class Pacer:
    """Divides work on the event loop into slices of about a millisecond.

    Work is counted and not timed, so that its slices are the same in every run.

    Args:
        per_slice: pieces of work, each of about a microsecond, after which others run.
    """

    def __init__(self, per_slice: int = 1000) -> None:
        self._per_slice = per_slice
        self._done = 0

    async def worked(self, pieces: int) -> None:
        """So many pieces of work were done. Others run here when the slice is full."""
        self._done += pieces
        if self._done >= self._per_slice:
            self._done = 0
            await give_way()
