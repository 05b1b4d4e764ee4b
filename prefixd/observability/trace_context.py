"""The trace that a caller's request belongs to: W3C trace context, as the header `traceparent` carries it."""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST_CLIENT_ID = 128
"""Characters of the header `prefixd-request-id`, at most."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
_LONGEST_TRACEPARENT = 256


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The span of the caller within which it sent the request.

    Attributes:
        trace_id: 32 lower-case hexadecimal digits, not all 0.
        span_id: 16 lower-case hexadecimal digits, not all 0: the caller's span.
        sampled: whether the caller records its trace.
    """

    trace_id: str
    span_id: str
    sampled: bool

    @property
    def traceparent(self) -> str:
        """The header's value."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def parse_traceparent(value: str) -> TraceContext | None:
    """Returns the trace context of a `traceparent` header, None for a value that the W3C recommendation calls invalid:
    a receiver then begins a trace of its own. Of later versions the fields of version 00 are read."""
    if len(value) > _LONGEST_TRACEPARENT:
        return None
    match = _TRACEPARENT.fullmatch(value)
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1))


def check_client_id(value: str) -> str:
    """Returns the id that a caller gave its request in `prefixd-request-id`; empty if it is too long or cannot be
    printed. A header for people must not fail a request."""
    return value if len(value) <= LONGEST_CLIENT_ID and value.isascii() and value.isprintable() else ""
