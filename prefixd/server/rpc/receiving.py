"""Messages are received a few at a time for each tenant, and where there are several tenants large ones slowly.

gRPC puts a message together on the event loop in one go, from 5 to 30 ms for 16 MiB, in which nobody else is served. So
between tenants those of one tenant are put together one after the other, and after one of many bytes the next waits
until as much time has passed as they take at `BYTES_PER_S`. How large a message is shows only then, so it is this that
waits, and not the receiving: a message that is slow to come keeps no other waiting, and those that are all here at once
do not have the loop at once. The pieces of a stream are not many bytes in this sense; a stream of larger ones is
refused.

Operators do not wait: whatever others do, they have to see it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from prefixd.base.errors import ExhaustedError, TooSlowError
from prefixd.base.fairness import PacedLine
from prefixd.base.pacer import call_arrived
from prefixd.base.tenants import Role, Tenant, Tenants
from prefixd.server.access.caller import Call, Caller
from prefixd.server.access.caller import Line as Turns
from prefixd_scheduler import SharedLimit

T = TypeVar("T")

AT_ONCE = 16
"""Messages of one tenant that may be on their way, 16 MiB each at most."""
AT_ONCE_OF_CALLER = 4
STREAMS = 32
"""Calls of one tenant at a time that send many messages; more wait. Any of them may be in the middle of one."""
STREAMS_OF_CALLER = 8
OPENING = 1024
"""Calls whose message is not here, of all tenants (`SharedLimit`)."""
BYTES_PER_S = 32 << 20
_SMALL_BYTES = 1 << 16
_LATER_BYTES = (1 << 20) + (1 << 12)
"""More than any later message of a stream may have, with what is around its data."""


Read = Callable[[], Coroutine[Any, Any, Any]]
"""`grpc.aio.ServicerContext.read`: receives the next message, or EOF; None where the call has ended. Waits once, until
it is here, and puts it together then."""


async def first_message(call: Call, read: Read) -> bytes | None:
    """The first message of a call, or its only one; None: it has none.

    The call's time is that until it has arrived; in line it may wait for longer.

    Raises:
        TooSlowError: it does not come.
        ExhaustedError: too many calls wait for theirs.
    """
    async with call.first() as line:
        try:
            async with asyncio.timeout(call.receive_s) as timeout:
                if line is None:
                    return await _receive(call, read)
                return await _InTurn(_receive(call, read), line, partial(timeout.reschedule, None))
        except TimeoutError:
            raise TooSlowError(
                f"the call's message was not here within {call.receive_s:g} s; send it at once, or less at a time"
            ) from None


async def later_message(call: Call, read: Read) -> bytes | None:
    """Another message of a call; None: it has no more."""
    async with call.later() as line:
        call.message_bytes = 0
        return await (_receive(call, read) if line is None else _InTurn(_receive(call, read), line))


async def _receive(call: Call, read: Read) -> bytes | None:
    """The next message; None for EOF, and where the call has ended. One counts as soon as it is put together."""
    message = await read()
    if not isinstance(message, bytes):
        return None
    call_arrived()
    call.message_bytes = len(message)
    return message


class CallerPlaces:
    """Gives places in the order in which they are asked for.

    Args:
        of_tenant: how many all callers of a tenant have together.
        of_caller: how many one caller has.
    """

    def __init__(self, of_tenant: int, of_caller: int) -> None:
        self._of_tenant, self._of_caller = of_tenant, of_caller
        self._tenants: dict[Tenant, asyncio.Semaphore] = {}
        self._callers: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def place(self, caller: Caller) -> AsyncGenerator[None]:
        """Waits for a place, and has it. All processes of a user, and all calls from a host, are one caller."""
        of_caller = self._callers.get(caller.origin)
        if of_caller is None:
            of_caller = self._callers[caller.origin] = asyncio.Semaphore(self._of_caller)
        of_tenant = self._tenants.setdefault(caller.tenant, asyncio.Semaphore(self._of_tenant))
        async with of_caller, of_tenant:
            yield


class Receiving:
    """When the messages of calls may be received.

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
        """Around the receiving of a caller's message: waits until that may begin, and gives where it waits once it has
        arrived. Raises ExhaustedError."""
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
        """Around the receiving of a later message of a stream; gives where it waits once it has arrived."""
        line = None if caller.role is Role.ADMIN else self._line(caller)
        try:
            yield line
        finally:
            if line is not None and (nbytes := call.message_bytes) > _LATER_BYTES:
                line.received(nbytes)

    def stream(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        """Around a call that sends many messages: waits for a place."""
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
    """Messages of one tenant that are here and are put together one after the other."""

    def received(self, nbytes: int) -> None:
        """One of so many bytes is put together; 0: none is."""
        if nbytes > _SMALL_BYTES:
            self.pay(nbytes / BYTES_PER_S)


class _InTurn(Generic[T]):
    """Awaits what a `Read` gives; between the message being here and being put together it waits in line.

    gRPC has it as its own memory until then, and frees it by nothing else: who is cancelled meanwhile goes to the end
    of the line, and is cancelled afterwards.

    Args:
        on_here: is called before it waits.
    """

    def __init__(
        self, reading: Coroutine[Any, Any, T], line: Turns, on_here: Callable[[], None] = lambda: None
    ) -> None:
        self._reading = reading
        self._line = line
        self._on_here = on_here

    def __await__(self) -> Generator[Any, Any, T]:
        reading, line = self._reading, self._line
        try:
            here: asyncio.Future[None] = reading.send(None)
        except StopIteration as ended:
            given: T = ended.value
            return given
        cancelled = False
        try:
            yield here
            self._on_here()
        except asyncio.CancelledError as error:
            if here.cancelled():
                return self._end(partial(reading.throw, error))
            cancelled = True
        except Exception as error:
            del here  # which has the error, which has this frame
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
        """What the read gives; this step ends it."""
        try:
            step()
        except StopIteration as ended:
            given: T = ended.value
            return given
        raise RuntimeError("the read waits a second time for a message that is here")
