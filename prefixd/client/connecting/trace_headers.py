"""The headers that say to which request of the caller a call belongs: `traceparent` (W3C trace context), its span, and
`prefixd-request-id`, its id."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_LONGEST_ID = 128
_LONGEST_SPAN = 256  # as far as the daemon reads; gRPC refuses a call with 16 KiB of headers
_given: ContextVar[str] = ContextVar("traceparent of prefixd's calls", default="")
_request_id: ContextVar[str] = ContextVar("id of the request that prefixd's calls are for", default="")


@contextmanager
def within_trace(traceparent: str) -> Iterator[None]:
    """A context whose calls of any client belong to a trace: `within_trace("00-4bf9...4736-00f0...02b7-01")`.

    A program that uses OpenTelemetry needs none: calls then belong to its current span. The daemon ignores a value that
    is no `traceparent`.
    """
    sendable = len(traceparent) <= _LONGEST_SPAN and traceparent.isascii() and traceparent.isprintable()
    token = _given.set(traceparent if sendable else "")
    try:
        yield
    finally:
        _given.reset(token)


@contextmanager
def within_request(request_id: str) -> Iterator[None]:
    """A context whose calls of any client are made for the caller's request with this id: `prefixd why ID` shows them.

    An id of more than 128 characters, or with characters that are not printable ASCII, is not sent.
    """
    sendable = len(request_id) <= _LONGEST_ID and request_id.isascii() and request_id.isprintable()
    token = _request_id.set(request_id if sendable else "")
    try:
        yield
    finally:
        _request_id.reset(token)


def trace_headers() -> tuple[tuple[str, str], ...]:
    """The headers of a call that is made now; none outside of a trace and of a request."""
    if request_id := _request_id.get():
        return (*_span_header(), ("prefixd-request-id", request_id))
    return _span_header()


def _span_header() -> tuple[tuple[str, str], ...]:
    if given := _given.get():
        return (("traceparent", given),)
    # A program that has a span has imported this module; the client needs no package for it.
    current_span = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    if current_span is None:  # not imported, or another thread imports it just now
        return ()
    span = current_span().get_span_context()
    if not span.is_valid:
        return ()
    return (("traceparent", f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"),)
