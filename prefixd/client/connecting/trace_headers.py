"""The caller's span, which calls tell the daemon in the header `traceparent` (W3C trace context)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_given: ContextVar[str] = ContextVar("traceparent of prefixd's calls", default="")


@contextmanager
def within_trace(traceparent: str) -> Iterator[None]:
    """A context whose calls of any client belong to a trace: `within_trace("00-4bf9...4736-00f0...02b7-01")`.

    A program that uses OpenTelemetry needs none: calls then belong to its current span. The daemon ignores a value that
    is no `traceparent`.
    """
    token = _given.set(traceparent if traceparent.isascii() and traceparent.isprintable() else "")
    try:
        yield
    finally:
        _given.reset(token)


def trace_headers() -> tuple[tuple[str, str], ...]:
    """The header of a call that is made now; none outside of a trace."""
    if given := _given.get():
        return (("traceparent", given),)
    # A program that has a span has imported this module; the client needs no package for it.
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return ()
    span = api.get_current_span().get_span_context()
    if not span.is_valid:
        return ()
    return (("traceparent", f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"),)
