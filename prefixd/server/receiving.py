"""Messages are received a few at a time for each tenant, and where there are several tenants large ones slowly.

gRPC receives a message on the event loop, all of it at once: 30 ms for 16 MiB, in which nobody else is served. So
between tenants a tenant's messages are received one after the other, and after one of many bytes the next waits until
as much time has passed as they take at `BYTES_PER_S`. How large a message is shows only when it is here; one that is
not here soon does not keep the tenant's next one waiting for longer than a moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar

from prefixd.tenants import Tenant, Tenants

AT_ONCE = 16
"""Messages of one tenant that may be on their way, 16 MiB each at most."""
RECEIVE_S = 60.0
"""A call whose message is not here by then is ended."""
BYTES_PER_S = 32 << 20
_SMALL_BYTES = 1 << 16
_SOON_S = 0.03

_received: ContextVar[Callable[[int], None]] = ContextVar("received")


def message_received(nbytes: int) -> None:
    """The message of the call that is being handled is here."""
    if (done := _received.get(None)) is not None:
        done(nbytes)


class Receiving:
    """When the messages of calls may be received.

    Args:
        tenants: all of them.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._lines: dict[Tenant, _Line] = {}

    async def turn(self, tenant: Tenant, call: asyncio.Task[object]) -> None:
        """Waits until the message of a tenant's call, which runs as this task, may be received."""
        line = self._lines.setdefault(tenant, _Line())
        await line.places.acquire()
        receipt = _Receipt(line, call)
        _received.set(receipt.end)
        if len(self._tenants) > 1:
            await line.turn()
        receipt.begin()


class _Line:
    """The messages of one tenant."""

    def __init__(self) -> None:
        self.places = asyncio.Semaphore(AT_ONCE)
        self._turn = asyncio.Lock()
        self._here = asyncio.Event()  # the last message, or nobody waits for it any more
        self._here.set()
        self._next_s = 0.0

    async def turn(self) -> None:
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
        self.places.release()
        self._here.set()
        if nbytes > _SMALL_BYTES:
            self._next_s = max(self._next_s, asyncio.get_running_loop().time()) + nbytes / BYTES_PER_S


class _Receipt:
    """A message that is being received."""

    def __init__(self, line: _Line, call: asyncio.Task[object]) -> None:
        self._line: _Line | None = line
        self._call = call
        self._late: asyncio.TimerHandle | None = None
        call.add_done_callback(lambda _: self.end())

    def begin(self) -> None:
        self._late = asyncio.get_running_loop().call_later(RECEIVE_S, self._call.cancel)

    def end(self, nbytes: int = 0) -> None:
        if self._line is not None:
            self._line.end(nbytes)
            self._line = None
        if self._late is not None:
            self._late.cancel()
