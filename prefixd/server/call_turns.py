"""Calls begin in turn, by tenant: who sends most is not served most.

gRPC hands calls over in the order in which they came, whoever sent them, so a tenant with a thousand calls under way
would have nearly all of the event loop. Here one call at a time is given to the loop. The others wait in a line for
each tenant, and the lines take turns:

    begun      b1
    waiting    a: a1    c: c1 c2 c3 c4 ...    b: b2        a1 is next, then c1, b2, c2

gRPC hands a call over in about three turns of the loop, and a call takes some ten: only if calls begin more slowly than
gRPC hands them over do they wait here, and not in gRPC. With three calls at a time a flood had its way.

The next call does not wait for all that a call does. One that goes on for longer than most, in turns or in time, waits
for a disk, for memory or for its caller, or does long work slice by slice, and the next one begins. Turns alone do not
tell: beside long work each of them takes as long as a slice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable

LONGEST_TURNS = 40
"""Turns of the event loop after which a call that is not over waits for something."""
LONGEST_S = 0.02
"""Seconds after which it does, however few turns that were."""


class CallTurns:
    """Who waits for a turn, and whose it is."""

    def __init__(self) -> None:
        self._begun: asyncio.Task[object] | None = None
        self._turns = 0  # of the loop since then, counted while others wait
        self._began_s = 0.0
        self._waiting: dict[Hashable, deque[tuple[asyncio.Future[None], asyncio.Task[object]]]] = {}  # first: next

    async def begin(self, tenant: Hashable, call: asyncio.Task[object]) -> None:
        """Returns when it is the turn of a tenant's call, which runs as this task."""
        if not self._waiting:
            if self._begun is None or self._begun.done():
                self._begin(call)
                return
            call.get_loop().call_soon(self._next)
        turn: asyncio.Future[None] = call.get_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((turn, call))
        await turn

    def pause(self, call: asyncio.Task[object]) -> None:
        """The call waits for its caller now, and has another turn when it goes on: the next one may begin."""
        if self._begun is call:
            self._begun = None

    def _begin(self, call: asyncio.Task[object]) -> None:
        self._begun, self._turns, self._began_s = call, 0, call.get_loop().time()

    def _is_over(self) -> bool:
        """Whether the call that began last is, or goes on for long."""
        if self._begun is None or self._begun.done() or self._turns >= LONGEST_TURNS:
            return True
        return self._begun.get_loop().time() - self._began_s >= LONGEST_S

    def _next(self) -> None:
        """Looks in each turn of the loop, as long as calls wait, whether one of them may begin."""
        self._turns += 1
        if self._is_over():
            while self._waiting:
                tenant = next(iter(self._waiting))
                line = self._waiting.pop(tenant)
                turn, call = line.popleft()
                if line:
                    self._waiting[tenant] = line  # behind the others
                if not turn.done():  # else the caller has gone
                    turn.set_result(None)
                    self._begin(call)
                    break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
