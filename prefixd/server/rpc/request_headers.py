"""The two headers that name a caller's request: `traceparent` (W3C trace context) and `prefixd-request-id`.

They are for people and tools that look at a request later. A wrong header is ignored: it must not fail the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prefixd.observability.trace_context import TraceContext, check_client_id, parse_traceparent

TRACEPARENT = "traceparent"
REQUEST_ID = "prefixd-request-id"


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """What a call says of the request that it belongs to.

    Attributes:
        client_id: the caller's own id; empty without one.
        trace: the caller's span; None without one.
    """

    client_id: str = ""
    trace: TraceContext | None = None


NO_HEADERS = RequestHeaders()


def read_headers(metadata: Iterable[tuple[str, str | bytes]]) -> RequestHeaders:
    """Returns what the headers of a call say. Of a header that comes more than once, none is taken."""
    found: dict[str, str] = {}
    for name, value in metadata:
        if name in (TRACEPARENT, REQUEST_ID):
            found[name] = "" if name in found or not isinstance(value, str) else value
    if not found:
        return NO_HEADERS
    return RequestHeaders(check_client_id(found.get(REQUEST_ID, "")), parse_traceparent(found.get(TRACEPARENT, "")))
