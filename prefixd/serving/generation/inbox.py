"""A bounded queue of the events that a caller has not read yet.

The dispatcher never waits for a caller, because other requests would wait, too. So a call whose caller does not read
while its sequences run on is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prefixd.base.errors import ExhaustedError
from prefixd.base.tenancy.tenants import Tenant
from prefixd.serving.request.request_events import Event, EventSink, NewTokens
from prefixd_scheduler import SharedLimit

MOST_UNREAD = 1 << 16  # tokens and logprobs of a call; some 17 MiB, besides the 4 MiB that gRPC has sent ahead
MOST_UNREAD_OF_ALL = 1 << 23  # of all calls together, including those kept for the end of a `best_of`


class Inbox:
    """A queue of events with the numbers of their sequences; bounded by the tokens and logprobs in it.

    Args:
        token_values: how much a token counts: 1, and 1 for each logprob that comes with it, its own included.
        on_full: called once, from the event loop, when the caller is too far behind; has to end the sequences.
        tenant: the caller's.
        of_all: counts the unread values of all tenants, by their names.
        keeps: events are kept in memory after `get`, so they count in `of_all` to the end.
    """

    def __init__(
        self,
        token_values: int,
        on_full: Callable[[], None],
        tenant: Tenant,
        of_all: SharedLimit,
        *,
        keeps: bool = False,
    ) -> None:
        self._token_values = token_values
        self._on_full = on_full
        self._tenant = tenant
        self._of_all = of_all
        self._keeps = keeps
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._unread = 0
        self._counted = 0  # in `of_all`
        self._closed = False
        self._failure: ExhaustedError | None = None

    def sink(self, index: int) -> EventSink:
        """The sink for the events of the sequence with this number."""
        return _Sink(index, self)

    def put(self, index: int, event: Event) -> None:
        """Adds an event at the end. Above the bound all unread events are dropped and the inbox is closed."""
        if self._closed:
            return
        values, of_all, name = self._values(event), self._of_all, self._tenant.name
        self._unread += values
        self._events.put_nowait((index, event))  # wakes the caller, also to be told of the failure
        if self._unread > MOST_UNREAD:
            self._failure = ExhaustedError(
                f"{self._unread} tokens and logprobs wait to be read, {MOST_UNREAD} may: the caller reads too slowly; "
                "read the stream as it comes, or ask for fewer sequences, tokens or logprobs"
            )
        elif not values or of_all.try_add(name, values):
            self._counted += values
            return
        else:
            self._tenant.refused["unread_tokens"] += 1
            self._failure = ExhaustedError(
                f"tenant {name}: {of_all[name]} tokens and logprobs of its calls wait to be read, and {of_all.total} "
                f"of all tenants, which have {of_all.limit} together (the daemon's own limit); read the streams as "
                "they come, or ask for fewer sequences, tokens or logprobs"
            )
        self.close()
        self._events = asyncio.Queue()
        asyncio.get_running_loop().call_soon(self._on_full)  # the dispatcher is in the middle of a step now

    async def get(self) -> tuple[int, Event]:
        """Takes the next event. Raises ExhaustedError when there were too many."""
        if self._failure is None:
            index, event = await self._events.get()
        if self._failure is not None:  # also one that came while it waited
            raise self._failure
        values = self._values(event)
        self._unread -= values
        if not self._keeps:
            self._count(-values)
        return index, event

    def close(self) -> None:
        """Ignores further events; those that are unread count no more."""
        self._closed = True
        self._count(-self._counted)

    def _count(self, values: int) -> None:
        self._counted += values
        self._of_all.add(self._tenant.name, values)

    def _values(self, event: Event) -> int:
        return self._token_values * len(event.token_ids) if isinstance(event, NewTokens) else 0


class _Sink:
    """One sequence's sink into an inbox."""

    def __init__(self, index: int, inbox: Inbox) -> None:
        self._index = index
        self._inbox = inbox

    def put_nowait(self, event: Event) -> None:
        """Adds an event at the end."""
        self._inbox.put(self._index, event)
