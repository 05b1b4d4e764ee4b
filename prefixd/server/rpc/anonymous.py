"""Limits the calls of anonymous callers, who may only ask for the daemon's health: a few at a time from each host."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from prefixd.base.errors import ExhaustedError
from prefixd.server.rpc.receiving import Call, Line

AT_ONCE = 16
"""Calls whose message has not arrived."""
AT_ONCE_OF_HOST = 4
CALLS = 512
"""Calls under way; an answered call counts until its caller has read the answer."""
CALLS_OF_HOST = 128
_RECEIVE_S = 5.0
"""A call fails if its message has not arrived after this time."""
_HOSTS = 256  # lines kept before the idle ones are dropped


class AnonymousCalls:
    """Counts anonymous calls by host, and decides when their messages may be received."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._sending: Counter[str] = Counter()  # those of them whose message has not arrived
        self._lines: dict[str, Line] = {}

    def begin(self, host: str, call: asyncio.Task[Any]) -> None:
        """Counts a call from a host until its task is done, when its answer is sent. Raises ExhaustedError."""
        _check(self._calls, host, CALLS, CALLS_OF_HOST, "are under way", "read the answers of those before, try again")
        _count(self._calls, host, 1)
        call.add_done_callback(lambda _: _count(self._calls, host, -1))

    @asynccontextmanager
    async def receiving(self, host: str, call: Call) -> AsyncGenerator[Line]:
        """Encloses the receiving of a message from a host; yields the line in which it waits after its arrival.

        Raises:
            ExhaustedError: too many messages are in transit.
        """
        _check(self._sending, host, AT_ONCE, AT_ONCE_OF_HOST, "send their messages", "try again")
        _count(self._sending, host, 1)
        try:
            line = self._line(host)
            try:
                yield line
            finally:
                line.received(call.message_bytes)
        finally:
            _count(self._sending, host, -1)

    def _line(self, host: str) -> Line:
        if len(self._lines) >= _HOSTS:
            self._lines = {each: line for each, line in self._lines.items() if each in self._sending or not line.idle}
        return self._lines.setdefault(host, Line())


def _check(calls: Counter[str], host: str, most: int, most_of_host: int, what: str, remedy: str) -> None:
    total, of_host = calls.total(), calls[host]
    if total >= most or of_host >= most_of_host:
        raise ExhaustedError(
            f"{total} calls to the health service {what}, {of_host} of them from here; {remedy} later, or show a token"
        )


def _count(calls: Counter[str], host: str, more: int) -> None:
    calls[host] += more
    if not calls[host]:
        del calls[host]


class AnonymousCall(Call):
    """One anonymous call. The health service takes no streams of messages.

    Args:
        calls: all anonymous calls.
        host: where the call comes from.
        refusal_turn: waits until anonymous callers may be told of a limit.
    """

    receive_s = _RECEIVE_S

    def __init__(self, calls: AnonymousCalls, host: str, refusal_turn: Callable[[], Awaitable[object]]) -> None:
        super().__init__(None)
        self._calls = calls
        self._host = host
        self._refusal_turn = refusal_turn

    def first(self) -> AbstractAsyncContextManager[Line]:
        return self._calls.receiving(self._host, self)

    async def refusal_turn(self) -> None:
        await self._refusal_turn()
