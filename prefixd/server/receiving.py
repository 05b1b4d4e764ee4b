"""Messages are received a few at a time for each tenant, and where there are several tenants large ones slowly.

gRPC puts a message together on the event loop in one go, from 5 to 30 ms for 16 MiB, in which nobody else is served. So
between tenants a tenant's messages are received one after the other, and after one of many bytes the next waits until
as much time has passed as they take at `BYTES_PER_S`. How large a message is shows only when it is here; one that is
not here soon does not keep the tenant's next one waiting for longer than a moment, and in the end its call fails. The
pieces of a stream are not many bytes in this sense; a stream of larger ones is refused.

Operators do not wait: whatever others do, they have to see it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Protocol, TypeVar

from prefixd.errors import ExhaustedError, TooSlowError
from prefixd.server.caller import Caller
from prefixd.server.caller_places import CallerPlaces
from prefixd.tenants import Role, Tenant, Tenants
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
RECEIVE_S = 60.0
"""A call whose message is not here by then fails."""
BYTES_PER_S = 32 << 20
_SMALL_BYTES = 1 << 16
_LATER_BYTES = (1 << 20) + (1 << 12)
"""More than any later message of a stream may have, with what is around its data."""
_SOON_S = 0.03


class Door(Protocol):
    """What a call passes while it is received."""

    def first(self) -> AbstractAsyncContextManager[float]:
        """Around the receiving of a call's first message; gives the seconds that it may take."""
        ...

    def later(self) -> AbstractAsyncContextManager[None]:
        """Around the receiving of another one."""
        ...

    def stream(self) -> AbstractAsyncContextManager[None]:
        """Around a call that sends many."""
        ...


Read = Callable[[], Awaitable[T | None]]
"""Receives the next message; None: there is no more."""

_door: ContextVar[Door] = ContextVar("door")
_message_bytes: ContextVar[int] = ContextVar("message_bytes")


def set_door(door: Door) -> None:
    """From here on the messages of the call that is being handled go through this."""
    _door.set(door)


def set_message_bytes(nbytes: int) -> None:
    """So large is the message of the call that is being handled; it is here."""
    _message_bytes.set(nbytes)


def message_bytes() -> int:
    """Bytes of the last message of the call that is being handled; 0 as long as there is none."""
    return _message_bytes.get(0)


async def first_message(read: Read[T]) -> T | None:
    """The first message of the call that is being handled, or its only one; None: it has none.

    Raises:
        TooSlowError: it does not come.
        ExhaustedError: too many calls wait for theirs.
    """
    async with _door.get().first() as within_s:
        try:
            async with asyncio.timeout(within_s):
                return await read()
        except TimeoutError:
            raise TooSlowError(
                f"the call's message was not here within {within_s:g} s; send it at once, or less at a time"
            ) from None


async def later_message(read: Read[T]) -> T | None:
    """Another message of the call that is being handled; None: it has no more."""
    async with _door.get().later():
        set_message_bytes(0)
        return await read()


def stream() -> AbstractAsyncContextManager[None]:
    """Around a call that sends many messages: waits for a place."""
    return _door.get().stream()


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
    async def turn(self, caller: Caller) -> AsyncGenerator[None]:
        """Around the receiving of a caller's message: waits until that may begin. Raises ExhaustedError."""
        if caller.role is Role.ADMIN:
            yield
            return
        with self._counted(caller.tenant):
            async with self._places.place(caller):
                if self._tenants.calling == 1:
                    yield
                    return
                line = self._line(caller)
                await line.begin()
                try:
                    yield
                finally:
                    line.end(message_bytes())

    @asynccontextmanager
    async def later(self, caller: Caller) -> AsyncGenerator[None]:
        """Around the receiving of a later message of a stream: waits until that may begin."""
        if caller.role is Role.ADMIN or self._tenants.calling == 1:
            yield
            return
        line = self._line(caller)
        await line.begin()
        try:
            yield
        finally:
            nbytes = message_bytes()
            line.end(nbytes if nbytes > _LATER_BYTES else 0)

    def stream(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        """Around a call that sends many messages: waits for a place."""
        return self._streams.place(caller)

    def _line(self, caller: Caller) -> Line:
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


class Line:
    """Messages that are received one after the other."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._here = asyncio.Event()  # the last one, or nobody waits for it any more
        self._here.set()
        self._next_s = 0.0

    @property
    def paid(self) -> bool:
        """Whether nothing that was large is waited for any more."""
        return not self._turn.locked() and self._next_s <= asyncio.get_running_loop().time()

    async def begin(self) -> None:
        """Waits until the next message may be received."""
        async with self._turn:
            if not self._here.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_SOON_S):
                        await self._here.wait()
            pause_s = self._next_s - asyncio.get_running_loop().time()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            self._here.clear()

    def end(self, nbytes: int) -> None:
        """It is here, and so large; 0: it does not come, or the next one need not wait for its bytes."""
        self._here.set()
        if nbytes > _SMALL_BYTES:
            self._next_s = max(self._next_s, asyncio.get_running_loop().time()) + nbytes / BYTES_PER_S
