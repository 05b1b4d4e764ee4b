"""Calls of strangers, who may ask for the daemon's health: a few at a time of each host, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from prefixd.errors import ExhaustedError
from prefixd.server.receiving import Line, message_bytes

AT_ONCE = 16
"""Calls whose message is not here."""
AT_ONCE_OF_HOST = 4
RECEIVE_S = 5.0
"""A call whose message is not here by then fails."""
_HOSTS = 256  # whose large messages are remembered without a look at which are paid


class Strangers:
    """When their messages may be received."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._lines: dict[str, Line] = {}

    @asynccontextmanager
    async def turn(self, host: str) -> AsyncGenerator[float]:
        """Around the receiving of a message from a host: waits until that may begin. Gives the seconds that it may
        take. Raises ExhaustedError."""
        total, of_host = self._calls.total(), self._calls[host]
        if total >= AT_ONCE or of_host >= AT_ONCE_OF_HOST:
            raise ExhaustedError(
                f"{total} calls to the health service send their messages, {of_host} of them from here; try again "
                "later, or show a token"
            )
        self._calls[host] += 1
        try:
            line = self._line(host)
            await line.begin()
            try:
                yield RECEIVE_S
            finally:
                line.end(message_bytes())
        finally:
            self._calls[host] -= 1
            if not self._calls[host]:
                del self._calls[host]

    def _line(self, host: str) -> Line:
        if len(self._lines) >= _HOSTS:
            self._lines = {each: line for each, line in self._lines.items() if each in self._calls or not line.paid}
        return self._lines.setdefault(host, Line())


class StrangersDoor:
    """The `Door` of one call from a host. The health service has no streams of messages."""

    def __init__(self, strangers: Strangers, host: str) -> None:
        self._strangers = strangers
        self._host = host

    def first(self) -> AbstractAsyncContextManager[float]:
        """See `Door`."""
        return self._strangers.turn(self._host)

    def later(self) -> AbstractAsyncContextManager[None]:
        """See `Door`."""
        raise AssertionError("the health service takes one message a call")

    stream = later
