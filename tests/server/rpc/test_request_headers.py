"""The headers that name a caller's request; a wrong one never fails a call."""

from __future__ import annotations

from prefixd.observability.trace_context import TraceContext
from prefixd.server.rpc.request_headers import NO_HEADERS, RequestHeaders, read_headers

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_headers_are_read() -> None:
    found = read_headers((("user-agent", "x"), ("traceparent", PARENT), ("prefixd-request-id", "chat-7")))
    assert found == RequestHeaders(
        "chat-7", TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=True)
    )
    assert read_headers((("user-agent", "x"),)) is NO_HEADERS


def test_wrong_ones_are_ignored() -> None:
    assert read_headers((("traceparent", "hello"), ("prefixd-request-id", "x" * 1000))) == NO_HEADERS
    assert read_headers((("traceparent", PARENT), ("traceparent", PARENT))) == NO_HEADERS
    assert read_headers((("prefixd-request-id", b"\xff"),)) == NO_HEADERS
