"""Calls tell the daemon the caller's span."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest
from opentelemetry.sdk.trace import TracerProvider

from prefixd.client import within_request, within_trace
from prefixd.client.connecting.trace_headers import trace_headers

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_outside_of_a_trace_nothing_is_sent() -> None:
    assert trace_headers() == ()


def test_a_given_span_is_sent_in_its_context_only() -> None:
    seen = []
    with within_trace(PARENT):
        assert trace_headers() == (("traceparent", PARENT),)
        thread = threading.Thread(target=lambda: seen.append(trace_headers()))
        thread.start()
        thread.join()
    assert seen == [()] and trace_headers() == ()


def test_what_cannot_be_a_header_is_not_sent() -> None:
    for wrong in ("00\n-x", "x" * 20_000):  # vLLM keeps its clients' headers as they are
        with within_trace(wrong):
            assert trace_headers() == ()


def test_a_module_that_is_being_imported_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", ModuleType("opentelemetry.trace"))
    assert trace_headers() == ()


def test_opentelemetrys_current_span_is_sent() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("mine") as span:
        context = span.get_span_context()
        ((name, value),) = trace_headers()
        version, trace_id, span_id, flags = value.split("-")
        assert (name, version) == ("traceparent", "00") and int(flags, 16) & 1
        assert (int(trace_id, 16), int(span_id, 16)) == (context.trace_id, context.span_id)
        with within_trace(PARENT):
            assert trace_headers() == (("traceparent", PARENT),)


def test_the_requests_id_is_sent_with_or_without_a_span() -> None:
    with within_request("chat-7"):
        assert trace_headers() == (("prefixd-request-id", "chat-7"),)
        with within_trace(PARENT):
            assert trace_headers() == (("traceparent", PARENT), ("prefixd-request-id", "chat-7"))
        for wrong in ("x" * 129, "a\nb", "\u00e9"):
            with within_request(wrong):
                assert trace_headers() == ()
    assert trace_headers() == ()
