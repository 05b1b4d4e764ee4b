"""The log of requests: the records of those that run and of the last ones that have ended, in bounded memory."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from itertools import islice

from prefixd.base.errors import PrefixdError
from prefixd.observability.actor import failed_in
from prefixd.observability.request_record import Kind, RequestRecord
from prefixd.observability.trace_context import TraceContext

log = logging.getLogger(__name__)

DEFAULT_KEPT = 4096
LONGEST_ID = 256
"""Characters of an id, at most; a call with a longer id is refused, and its record gets a number."""
MOST_OF_AN_ID = 64
"""Records of one id that are found by it: the latest calls of an engine's request. Each tenant has as many: it may
choose another's ids."""
_DIGITS = 20  # of a record's number


class RequestLog:
    """Makes the record of each request and keeps the last ones. Used from the event loop alone.

    Args:
        clock: seconds, of all times in records.
        kept: number of records to keep; 0: none, and listeners are told all the same.
        unix_clock: seconds since 1970.

    Attributes:
        kept: number of records to keep.
        ended: listeners; each is called once with every record that has ended, on the event loop, so it must be quick.
            What it raises is logged. A listener may read the record later: nothing changes it any more.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        kept: int = DEFAULT_KEPT,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self.ended: list[Callable[[RequestRecord], None]] = []
        self._clock = clock
        self._unix_clock = unix_clock
        self.kept = kept
        self._records = deque[RequestRecord](maxlen=kept)  # in the order of their numbers
        self._begun = 0  # records since the start; the last one has this number
        self._by_id: dict[str, dict[str, list[int]]] = {}
        """Id or client's id -> tenant -> numbers, the oldest first. A record that is named by its number is not in it:
        most calls of engines are."""

    def __len__(self) -> int:
        return len(self._records)

    def begin(
        self,
        kind: Kind,
        method: str,
        *,
        id: str = "",
        tenant: str = "",
        model: str = "",
        arrival_s: float | None = None,
        client_id: str = "",
        trace: TraceContext | None = None,
    ) -> RequestRecord:
        """Begins the record of a request.

        Args:
            kind: what was asked for.
            method: the call's name.
            id: its id; empty: the client's, or else a number.
            tenant: the tenant's name.
            model: the model's name, or the namespace's.
            arrival_s: when the call came; None: now.
            client_id: from the header `prefixd-request-id`.
            trace: from the header `traceparent`.
        """
        self._begun += 1
        number, now_s = self._begun, self._clock()
        arrival_s = now_s if arrival_s is None else arrival_s
        record = RequestRecord(
            id=(id if len(id) <= LONGEST_ID and id.isprintable() else "") or client_id or f"c{number}",
            kind=kind,
            tenant=tenant,
            model=model,
            method=method,
            arrival_s=arrival_s,
            arrival_unix_s=self._unix_clock() - (now_s - arrival_s),
            client_id=client_id,
            trace=trace,
            _on_end=self._end,
        )
        if self.kept:
            if len(self._records) == self.kept:
                self._leave_oldest()
            self._records.append(record)
            if id or client_id:
                self._enter(record.id, tenant, number)
                if client_id and client_id != record.id:
                    self._enter(client_id, tenant, number)
        return record

    def rename(self, record: RequestRecord, id: str) -> None:
        """Gives a record that has just begun the id that was chosen for the request."""
        if record.id == id:
            return
        numbers = reversed(self._by_tenant(record.id).get(record.tenant, []))
        number = next((number for number in numbers if self._of_number(number) is record), None)
        if number is not None:
            if record.id != record.client_id:
                self._leave(record.id, record.tenant, number)
            self._enter(id, record.tenant, number)
        record.id = id

    def find(self, id: str) -> list[RequestRecord]:
        """The latest records with this id, or with this client's id, the oldest first: one of a request of Generate,
        several of an engine's request. `MOST_OF_AN_ID` at most, of which tenants that use the same id have shares."""
        by_tenant = self._by_tenant(id)
        share = max(1, MOST_OF_AN_ID // max(1, len(by_tenant)))
        latest = sorted(number for numbers in by_tenant.values() for number in numbers[-share:])
        found = map(self._of_number, latest[-MOST_OF_AN_ID:])
        return [record for record in found if record is not None]

    @property
    def now_s(self) -> float:
        """The present time of the records' clock."""
        return self._clock()

    def last(self, n: int, *, kinds: Collection[Kind] | None = None) -> list[RequestRecord]:
        """The last `n` records, the latest first. `kinds`: only those of these kinds."""
        latest = reversed(self._records)
        return list(islice((record for record in latest if kinds is None or record.kind in kinds), n))

    def _by_tenant(self, id: str) -> dict[str, list[int]]:
        """Tenant -> numbers of the records with this id, the oldest first."""
        by_tenant, digits = self._by_id.get(id, {}), id.removeprefix("c")
        if len(digits) >= _DIGITS or not digits.isdecimal():
            return by_tenant
        number = int(digits)
        record = self._of_number(number)
        if record is None or record.id != id or number in by_tenant.get(record.tenant, ()):
            return by_tenant
        return by_tenant | {record.tenant: sorted((*by_tenant.get(record.tenant, ()), number))}

    def _of_number(self, number: int) -> RequestRecord | None:
        place = number - (self._begun - len(self._records)) - 1
        return self._records[place] if 0 <= place < len(self._records) else None

    def _end(self, record: RequestRecord) -> None:
        for listener in self.ended:
            try:
                listener(record)
            except Exception:  # who looks at a request must not hurt it
                what = "request %s has ended, and what was to be noted of it failed"
                log.exception(what, record.id, extra={"request_id": record.id})

    def _enter(self, id: str, tenant: str, number: int) -> None:
        numbers = self._by_id.setdefault(id, {}).setdefault(tenant, [])
        numbers.append(number)
        if len(numbers) > MOST_OF_AN_ID:
            del numbers[0]

    def _leave(self, id: str, tenant: str, number: int) -> None:
        by_tenant = self._by_id.get(id, {})
        numbers = by_tenant.get(tenant, [])
        if number in numbers:
            numbers.remove(number)
        if not numbers:
            by_tenant.pop(tenant, None)
        if not by_tenant:
            self._by_id.pop(id, None)

    def _leave_oldest(self) -> None:
        record, number = self._records[0], self._begun - len(self._records)
        for id in (record.id, record.client_id):
            if id in self._by_id:
                self._leave(id, record.tenant, number)


def end_with_error(record: RequestRecord, error: BaseException, now_s: float) -> None:
    """Ends a record with an error: `refused` if nothing ran and the caller or a limit is the reason, else `failed`; and
    `cancelled` if the caller has gone."""
    if isinstance(error, PrefixdError):
        refused = record.handed_over_s is None and error.status in _REFUSALS
        record.end("refused" if refused else "failed", now_s, status=error.status, reason=error.without_prompt)
    elif isinstance(error, Exception):
        record.end("failed", now_s, status="INTERNAL", reason=f"{type(error).__name__}: {error}")
        failed_in(record.id, error)
    else:  # cancelled: the caller hung up
        record.end("cancelled", now_s)


_REFUSALS = frozenset(
    {
        "ALREADY_EXISTS",
        "FAILED_PRECONDITION",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "UNAUTHENTICATED",
        "UNAVAILABLE",
        "UNIMPLEMENTED",
    }
)
