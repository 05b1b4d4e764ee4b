"""Receives the messages of each tenant a few at a time, and large ones slowly when there are several tenants.

gRPC assembles a message on the event loop in one step, 5 to 30 ms for 16 MiB, during which no other call is served. So
with several tenants the messages of one tenant are assembled one after the other, and after a large one the next waits
for the time that its bytes take at `BYTES_PER_S`. A message's size is known only when it is assembled, so the
assembling waits, not the receiving: a slow sender delays no other call, and messages that arrive together do not take
the loop together. The pieces of a stream are too small to count as large; a stream of larger pieces is refused.

Operators never wait: they must be able to see what other callers do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from prefixd.base.errors import ExhaustedError, TooSlowError
from prefixd.base.long_work.pacer import call_arrived
from prefixd.base.tenancy.fairness import PacedLine
from prefixd.base.tenancy.tenants import Role, Tenant, Tenants
from prefixd.server.access.identities import Caller
from prefixd.server.rpc.request_headers import NO_HEADERS
from prefixd_scheduler import SharedLimit

T = TypeVar("T")

AT_ONCE = 16
"""Messages of one tenant that may be in transit, 16 MiB each at most."""
AT_ONCE_OF_CALLER = 4
STREAMS = 32
"""Streams of one tenant at a time; more wait. Each may be in the middle of a message."""
STREAMS_OF_CALLER = 8
OPENING = 1024
"""Calls whose message has not arrived, of all tenants (`SharedLimit`)."""
BYTES_PER_S = 32 << 20
_SMALL_BYTES = 1 << 16
_LATER_BYTES = (1 << 20) + (1 << 12)
"""The most bytes that a later message of a stream may have, with the fields around its data."""


class Turns(Protocol):
    """A line in which messages that have arrived wait until gRPC may put them together."""

    async def turn(self) -> None:
        """Waits until the next message may be put together."""
        ...


class Call:
    """One call, from its arrival on.

    Attributes:
        caller: the caller; None for an anonymous caller, which may only ask for the daemon's health.
        receive_s: seconds that its first message may take to arrive.
        headers: what its headers say of the request that it belongs to; the door reads them.
        message_bytes: bytes of the last message that has arrived; 0 before the first message and between two.
    """

    receive_s = 60.0

    def __init__(self, caller: Caller | None) -> None:
        self.caller = caller
        self.message_bytes = 0
        self.headers = NO_HEADERS
        self._came_s = asyncio.get_running_loop().time()

    @property
    def waited_s(self) -> float:
        """Seconds since the call arrived: it received its message meanwhile, perhaps behind other messages."""
        return asyncio.get_running_loop().time() - self._came_s

    def first(self) -> AbstractAsyncContextManager[Turns | None]:
        """Wraps the receiving of the first message; yields the line in which the message waits after its arrival."""
        raise NotImplementedError

    def later(self) -> AbstractAsyncContextManager[Turns | None]:
        """Wraps the receiving of a later message; yields its line likewise."""
        raise NotImplementedError

    def stream(self) -> AbstractAsyncContextManager[None]:
        """Wraps the whole of a call that sends many messages."""
        raise NotImplementedError

    async def refusal_turn(self) -> None:
        """Waits until the caller may be told that it has reached a limit."""


CURRENT_CALL: ContextVar[Call] = ContextVar("call")
"""The call that is being handled; the door sets it."""


def current_call() -> Call:
    """Returns the call that is being handled. Raises LookupError outside of a call."""
    return CURRENT_CALL.get()


def current_caller() -> Caller:
    """Returns the caller of the call that is being handled. Raises LookupError outside of a call."""
    caller = CURRENT_CALL.get().caller
    if caller is None:
        raise LookupError("the caller is anonymous")
    return caller


Read = Callable[[], Coroutine[Any, Any, Any]]
"""`grpc.aio.ServicerContext.read`: returns the next message, EOF, or None when the call has ended. It waits once, until
the message has arrived, and then assembles it."""


async def first_message(call: Call, read: Read) -> bytes | None:
    """Returns the first or only message of a call; None if it has none.

    The call's time limit covers the time until the message has arrived; in line it may wait longer.

    Raises:
        TooSlowError: the message does not arrive in time.
        ExhaustedError: too many calls wait for their messages.
    """
    async with call.first() as line:
        try:
            async with asyncio.timeout(call.receive_s) as timeout:
                if line is None:
                    return await _receive(call, read)
                return await _InTurn(_receive(call, read), line, partial(timeout.reschedule, None))
        except TimeoutError:
            raise TooSlowError(
                f"the call's message did not arrive within {call.receive_s:g} s; send it at once, or less at a time"
            ) from None


async def later_message(call: Call, read: Read) -> bytes | None:
    """Returns the next message of a call; None if it has no more."""
    async with call.later() as line:
        call.message_bytes = 0
        return await (_receive(call, read) if line is None else _InTurn(_receive(call, read), line))


async def _receive(call: Call, read: Read) -> bytes | None:
    """Returns the next message; None for EOF and when the call has ended. Counts the message once it is assembled."""
    message = await read()
    if not isinstance(message, bytes):
        return None
    call_arrived()
    call.message_bytes = len(message)
    return message


class CallerPlaces:
    """Grants slots in the order of the requests for them.

    Args:
        of_tenant: slots of all callers of a tenant together.
        of_caller: slots of one caller.
    """

    def __init__(self, of_tenant: int, of_caller: int) -> None:
        self._of_tenant, self._of_caller = of_tenant, of_caller
        self._tenants: dict[Tenant, asyncio.Semaphore] = {}
        self._callers: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def place(self, caller: Caller) -> AsyncGenerator[None]:
        """Waits for a slot and holds it. All processes of a user, and all calls from a host, are one caller."""
        of_caller = self._callers.get(caller.origin)
        if of_caller is None:
            of_caller = self._callers[caller.origin] = asyncio.Semaphore(self._of_caller)
        of_tenant = self._tenants.setdefault(caller.tenant, asyncio.Semaphore(self._of_tenant))
        async with of_caller, of_tenant:
            yield


class Receiving:
    """Decides when the message of a call may be received.

    Args:
        tenants: all of them.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._places = CallerPlaces(AT_ONCE, AT_ONCE_OF_CALLER)
        self._streams = CallerPlaces(STREAMS, STREAMS_OF_CALLER)
        self._lines: dict[Tenant, Line] = {}
        self._opening = SharedLimit(OPENING, lambda: tenants.calling)

    @asynccontextmanager
    async def first(self, caller: Caller, call: Call) -> AsyncGenerator[Line | None]:
        """Encloses the receiving of a first message: waits until it may begin, and yields the line in which the
        message waits after its arrival. Raises ExhaustedError."""
        if caller.role is Role.ADMIN:
            yield None
            return
        with self._counted(caller.tenant):
            async with self._places.place(caller):
                line = self._line(caller)
                try:
                    yield line
                finally:
                    if line is not None:
                        line.received(call.message_bytes)

    @asynccontextmanager
    async def later(self, caller: Caller, call: Call) -> AsyncGenerator[Line | None]:
        """Encloses the receiving of a later message; yields the line in which the message waits after its arrival."""
        line = None if caller.role is Role.ADMIN else self._line(caller)
        try:
            yield line
        finally:
            if line is not None and (nbytes := call.message_bytes) > _LATER_BYTES:
                line.received(nbytes)

    def stream(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        """Encloses a call that sends many messages: waits for a slot."""
        return self._streams.place(caller)

    def _line(self, caller: Caller) -> Line | None:
        if self._tenants.calling == 1:
            return None
        return self._lines.setdefault(caller.tenant, Line())

    @contextmanager
    def _counted(self, tenant: Tenant) -> Generator[None]:
        opening = self._opening
        if not opening.left(tenant):
            tenant.refused["opening"] += 1
            raise ExhaustedError(
                f"tenant {tenant.name}: the messages of {opening[tenant]} calls are on their way, and of "
                f"{opening.total} of all tenants, which have {OPENING} together; send fewer at a time"
            )
        opening.add(tenant, 1)
        try:
            yield
        finally:
            opening.add(tenant, -1)


class Line(PacedLine):
    """The line of one tenant's messages that have arrived and are assembled one after the other."""

    def received(self, nbytes: int) -> None:
        """Makes the next message wait for the time that `nbytes` bytes cost. 0: no message was assembled."""
        if nbytes > _SMALL_BYTES:
            self.pay(nbytes / BYTES_PER_S)


class _InTurn(Generic[T]):
    """Awaits a `Read`, and waits in line between the message's arrival and its assembly.

    Until it is assembled a message occupies gRPC's memory, which nothing else frees. So a call that is cancelled in
    line still waits for its turn, and is cancelled afterwards.

    Args:
        on_arrival: called when the message has arrived.
    """

    def __init__(
        self, reading: Coroutine[Any, Any, T], line: Turns, on_arrival: Callable[[], None] = lambda: None
    ) -> None:
        self._reading = reading
        self._line = line
        self._on_arrival = on_arrival

    def __await__(self) -> Generator[Any, Any, T]:
        reading, line = self._reading, self._line
        try:
            arrival: asyncio.Future[None] = reading.send(None)
        except StopIteration as ended:
            given: T = ended.value
            return given
        cancelled = False
        try:
            yield arrival
            self._on_arrival()
        except asyncio.CancelledError as error:
            if arrival.cancelled():
                return self._end(partial(reading.throw, error))
            cancelled = True
        except Exception as error:
            del arrival  # it refers to the error, which refers to this frame
            return self._end(partial(reading.throw, error))
        while True:
            try:
                yield from line.turn().__await__()
                break
            except asyncio.CancelledError:
                cancelled = True
        try:
            return self._end(partial(reading.send, None))
        finally:
            if cancelled:
                raise asyncio.CancelledError

    @staticmethod
    def _end(step: Callable[[], object]) -> T:
        """Returns the result of the read, which this step completes."""
        try:
            step()
        except StopIteration as ended:
            given: T = ended.value
            return given
        raise RuntimeError("the read waits a second time for a message that has arrived")
