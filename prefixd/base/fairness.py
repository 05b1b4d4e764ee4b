"""Turns and limits of tenants, in front of what takes work first come, first served.

`TenantTurns`: one piece of work of each tenant at a time. `CallTurns`: one call at a time, round robin over tenants.
`PacedLine`: one after the other, with pauses. `SharedBytes`: bytes of requests, within a `SharedLimit`.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Hashable
from contextlib import asynccontextmanager, contextmanager

from prefixd.base.errors import ExhaustedError
from prefixd.base.tenants import Tenant
from prefixd_scheduler import SharedLimit


class TenantTurns:
    """Lets one of each tenant in; its others wait here. So nobody waits behind more than one of another tenant."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}  # of tenants of which one is in

    @asynccontextmanager
    async def turn(self, tenant: Hashable) -> AsyncGenerator[None]:
        """Waits until none of the tenant is in. Raises CancelledError when it is closed meanwhile, too."""
        if (line := self._waiting.get(tenant)) is None:
            self._waiting[tenant] = deque()
        else:
            waits = asyncio.get_running_loop().create_future()
            line.append(waits)
            try:
                await waits
            except asyncio.CancelledError:
                if not waits.cancelled():  # its turn has just come
                    self._next(tenant)
                raise
        try:
            yield
        finally:
            self._next(tenant)

    def close(self) -> None:
        """Nobody who waits is let in any more."""
        for line in self._waiting.values():
            for waits in line:
                waits.cancel()

    def _next(self, tenant: Hashable) -> None:
        line = self._waiting[tenant]
        while line:
            if not (waits := line.popleft()).done():
                waits.set_result(None)
                return
        del self._waiting[tenant]


class PacedLine:
    """Turns one after the other; after one that cost something the next waits until that time has passed.

    Args:
        burst_s: seconds of costs that need not be waited for, after as long a time without a turn.
    """

    def __init__(self, burst_s: float = 0.0) -> None:
        self._burst_s = burst_s
        self._lock = asyncio.Lock()
        self._next_s = -math.inf

    @property
    def idle(self) -> bool:
        """Whether a turn would come at once."""
        return not self._lock.locked() and self._next_s <= asyncio.get_running_loop().time()

    async def turn(self, cost_s: float = 0.0) -> None:
        """Waits for a turn, which costs `cost_s` seconds. Who waited goes on before anything else happens."""
        async with self:
            if cost_s:
                self.pay(cost_s)

    async def __aenter__(self) -> None:
        """Waits for a turn, and has it until the block ends."""
        await self._lock.acquire()
        try:
            pause_s = self._next_s - asyncio.get_running_loop().time()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
        except BaseException:
            self._lock.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()

    def pay(self, cost_s: float) -> None:
        """A turn has cost this many seconds."""
        self._next_s = max(self._next_s, asyncio.get_running_loop().time() - self._burst_s) + cost_s


LONGEST_TURNS = 40
"""Turns of the event loop after which a call that is not over waits for something."""
LONGEST_S = 0.02
"""Seconds after which it does, however few turns that were."""


class CallTurns:
    """Who waits for a turn, and whose it is.

    gRPC hands calls over in the order in which they came, whoever sent them, so a tenant with a thousand calls under
    way would have nearly all of the event loop. Here one call at a time is given to the loop. The others wait in a line
    for each tenant, and the lines take turns:

        begun      b1
        waiting    a: a1    c: c1 c2 c3 c4 ...    b: b2        a1 is next, then c1, b2, c2

    gRPC hands a call over in about three turns of the loop, and a call takes some ten: only if calls begin more slowly
    than gRPC hands them over do they wait here, and not in gRPC. With three calls at a time a flood had its way.

    The next call does not wait for all that a call does. One that goes on for longer than most, in turns or in time,
    waits for a disk, for memory or for its caller, or does long work slice by slice, and the next one begins. Turns
    alone do not tell: beside long work each of them takes as long as a slice.
    """

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


class SharedBytes:
    """Counts bytes and refuses what is too much; each tenant has its part (`SharedLimit`).

    Args:
        most_bytes: of all calls together.
        what: they are bytes of: "images".
        limit: what bounds them: "worker.images_bytes".
        tenants: how many tenants there are.
    """

    def __init__(self, most_bytes: int, what: str, limit: str, tenants: Callable[[], int] = lambda: 1) -> None:
        self._shared = SharedLimit(most_bytes, tenants)
        self._what = what
        self._limit = limit

    @property
    def nbytes(self) -> int:
        """Of all calls."""
        return self._shared.total

    @contextmanager
    def held(self, tenant: Tenant, nbytes: int) -> Generator[None]:
        """While a call has these. Raises ExhaustedError."""
        shared = self._shared
        if nbytes and not shared.try_add(tenant.name, nbytes):
            tenant.refused[self._limit] += 1
            raise ExhaustedError(
                f"the request has {nbytes} bytes of {self._what}, others have {self.nbytes}, and {self._limit} allows "
                f"{shared.limit}, of which {shared.reserved} are kept for each tenant; send it again later"
            )
        try:
            yield
        finally:
            if nbytes:
                shared.add(tenant.name, -nbytes)
