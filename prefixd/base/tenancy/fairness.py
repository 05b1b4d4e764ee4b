"""Turns and limits of tenants, in front of a queue that serves first come, first served.

`TenantTurns` lets one piece of work of each tenant in at a time. `CallTurns` begins one call at a time, round robin
over tenants. `PacedLine` gives turns one after the other, with pauses. `SharedLimit` (the scheduler's) divides a limit;
`SharedBytes` limits bytes of requests with it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Hashable
from contextlib import asynccontextmanager, contextmanager

from prefixd.base.errors import ExhaustedError
from prefixd.base.tenancy.tenants import Tenant
from prefixd_scheduler import SharedLimit

__all__ = ["CallTurns", "PacedLine", "SharedBytes", "SharedLimit", "TenantTurns"]


class TenantTurns:
    """Lets one piece of work of each tenant in; the tenant's others wait here.

    So no work waits behind more than one piece of each other tenant.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}  # of tenants that have work inside

    @asynccontextmanager
    async def turn(self, tenant: Hashable) -> AsyncGenerator[None]:
        """Waits until no other work of the tenant is inside. Raises CancelledError also if `close` is called."""
        if (line := self._waiting.get(tenant)) is None:
            self._waiting[tenant] = deque()
        else:
            waits = asyncio.get_running_loop().create_future()
            line.append(waits)
            try:
                await waits
            except asyncio.CancelledError:
                if not waits.cancelled():  # it had just got its turn
                    self._next(tenant)
                raise
        try:
            yield
        finally:
            self._next(tenant)

    def close(self) -> None:
        """Cancels all waiting work."""
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
    """Gives turns one after the other; after a turn that cost some seconds the next turn waits that long.

    Args:
        burst_s: after this long without a turn, turns up to this cost need not wait.
    """

    def __init__(self, burst_s: float = 0.0) -> None:
        self._burst_s = burst_s
        self._lock = asyncio.Lock()
        self._next_s = -math.inf

    @property
    def idle(self) -> bool:
        """True if a turn would come at once."""
        return not self._lock.locked() and self._next_s <= asyncio.get_running_loop().time()

    async def turn(self, cost_s: float = 0.0) -> None:
        """Waits for a turn, which costs `cost_s` seconds. The caller runs on before any other task."""
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
        """Adds the cost of a turn: the next turn waits this many seconds."""
        self._next_s = max(self._next_s, asyncio.get_running_loop().time() - self._burst_s) + cost_s


LONGEST_TURNS = 40
"""Turns of the event loop after which the next call may begin, since the present one waits for something."""
LONGEST_S = 0.02
"""Seconds after which the next call may begin, after any number of turns."""


class CallTurns:
    """Begins one call at a time, round robin over tenants.

    gRPC hands calls over in the order of their arrival, so a tenant with a thousand calls under way would get nearly
    all of the event loop. Here one call at a time begins. The others wait in one line for each tenant, and the lines
    take turns:

        begun      b1
        waiting    a: a1    c: c1 c2 c3 c4 ...    b: b2        a1 is next, then c1, b2, c2

    gRPC hands a call over in about three turns of the loop, and a call takes about ten turns. Calls must begin more
    slowly than gRPC hands them over, else they would wait in gRPC and not here. With three calls at a time, a flood of
    one tenant's calls still delayed the others.

    The next call does not wait for the end of a long call. A call that takes longer than most, in turns or in time,
    waits for a disk, for memory or for its caller, or works slice by slice; then the next one begins. The number of
    turns alone is not enough: beside long work each turn takes as long as a slice.
    """

    def __init__(self) -> None:
        self._begun: asyncio.Task[object] | None = None
        self._turns = 0  # of the loop since then, counted while others wait
        self._began_s = 0.0
        self._waiting: dict[Hashable, deque[tuple[asyncio.Future[None], asyncio.Task[object]]]] = {}  # first: next

    async def begin(self, tenant: Hashable, call: asyncio.Task[object]) -> None:
        """Waits until a tenant's call, which runs as the task `call`, may begin."""
        if not self._waiting:
            if self._begun is None or self._begun.done():
                self._begin(call)
                return
            call.get_loop().call_soon(self._next)
        turn: asyncio.Future[None] = call.get_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((turn, call))
        await turn

    def pause(self, call: asyncio.Task[object]) -> None:
        """Lets the next call begin, since this call waits for its caller now; it calls `begin` again later."""
        if self._begun is call:
            self._begun = None

    def _begin(self, call: asyncio.Task[object]) -> None:
        self._begun, self._turns, self._began_s = call, 0, call.get_loop().time()

    def _is_over(self) -> bool:
        """True if the call that began last has ended or takes long."""
        if self._begun is None or self._begun.done() or self._turns >= LONGEST_TURNS:
            return True
        return self._begun.get_loop().time() - self._began_s >= LONGEST_S

    def _next(self) -> None:
        """Begins the next call if it may. Runs in each turn of the loop as long as calls wait."""
        self._turns += 1
        if self._is_over():
            while self._waiting:
                tenant = next(iter(self._waiting))
                line = self._waiting.pop(tenant)
                turn, call = line.popleft()
                if line:
                    self._waiting[tenant] = line  # behind the others
                if not turn.done():  # a done turn is that of a cancelled call
                    turn.set_result(None)
                    self._begin(call)
                    break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)


class SharedBytes:
    """Counts bytes that calls hold and refuses too many; each tenant has its part (`SharedLimit`).

    Args:
        most_bytes: limit of all calls together.
        what: name of the bytes for messages: "images".
        limit: name of the setting: "worker.images_bytes".
        tenants: returns the number of tenants.
    """

    def __init__(self, most_bytes: int, what: str, limit: str, tenants: Callable[[], int] = lambda: 1) -> None:
        self._shared = SharedLimit(most_bytes, tenants)
        self._what = what
        self._limit = limit

    @property
    def nbytes(self) -> int:
        """Bytes that all calls hold."""
        return self._shared.total

    @contextmanager
    def held(self, tenant: Tenant, nbytes: int) -> Generator[None]:
        """Counts the bytes of a call inside the block. Raises ExhaustedError if they are too many."""
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
