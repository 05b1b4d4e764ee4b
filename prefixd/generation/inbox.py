"""The events of a call's sequences that its caller has not read yet, and how many there may be.

The dispatcher never waits for a caller, because its other requests would wait, too. So when a caller does not read
while its sequences run on, the call is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prefixd.errors import ExhaustedError
from prefixd.server.request import Event, EventSink, NewTokens

MOST_UNREAD = 1 << 16  # tokens and logprobs; some 17 MiB, behind what gRPC has sent ahead (about 4 MiB)


class Inbox:
    """A queue of events with the numbers of their sequences; bounded by the tokens and logprobs in it.

    Args:
        token_values: what a token counts: 1, and 1 for each logprob that comes with it, its own included.
        on_full: called once, from the event loop, when the caller is too far behind; has to end the sequences.
    """

    def __init__(self, token_values: int, on_full: Callable[[], None]) -> None:
        self._token_values = token_values
        self._on_full = on_full
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._unread = 0
        self._failure: ExhaustedError | None = None

    def sink(self, index: int) -> EventSink:
        """Where the sequence with this number puts its events."""
        return _Sink(index, self)

    def put(self, index: int, event: Event) -> None:
        """Adds an event at the end. Above the bound all that is unread goes, and nothing is taken any more."""
        if self._failure is not None:
            return
        self._unread += self._values(event)
        self._events.put_nowait((index, event))
        if self._unread <= MOST_UNREAD:
            return
        self._failure = ExhaustedError(
            f"{self._unread} tokens and logprobs wait to be read, {MOST_UNREAD} may: the caller reads too slowly; read "
            "the stream as it comes, or ask for fewer sequences, tokens or logprobs"
        )
        self._events = asyncio.Queue()
        asyncio.get_running_loop().call_soon(self._on_full)  # the dispatcher is in the middle of a step now

    async def get(self) -> tuple[int, Event]:
        """Takes the next event. Raises ExhaustedError when there were too many."""
        if self._failure is None:
            index, event = await self._events.get()
        if self._failure is not None:  # or by now
            raise self._failure
        self._unread -= self._values(event)
        return index, event

    def _values(self, event: Event) -> int:
        return self._token_values * len(event.token_ids) if isinstance(event, NewTokens) else 0


class _Sink:
    """The end of an inbox that one sequence has."""

    def __init__(self, index: int, inbox: Inbox) -> None:
        self._index = index
        self._inbox = inbox

    def put_nowait(self, event: Event) -> None:
        """See `Inbox.put`."""
        self._inbox.put(self._index, event)
