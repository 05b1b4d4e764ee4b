"""`traceparent` and `prefixd-request-id`: what is valid is read, what is not is ignored."""

from __future__ import annotations

import pytest

from prefixd.observability.trace_context import TraceContext, check_client_id, parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_traceparent_is_read_and_written() -> None:
    found = parse_traceparent(f"00-{TRACE}-{SPAN}-01")
    assert found == TraceContext(TRACE, SPAN, True)
    assert found.traceparent == f"00-{TRACE}-{SPAN}-01"
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-00") == TraceContext(TRACE, SPAN, False)
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-03-more") == TraceContext(TRACE, SPAN, True), "of a later version"


@pytest.mark.parametrize(
    "value",
    [
        "",
        "hello",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"01-{TRACE}-{SPAN}-01-" + "x" * 300,
    ],
)
def test_an_invalid_one_is_none(value: str) -> None:
    assert parse_traceparent(value) is None


def test_a_client_id_is_short_and_printable() -> None:
    assert check_client_id("chat-7/2") == "chat-7/2"
    assert (
        check_client_id("x" * 129)
        == check_client_id("a\nb")
        == check_client_id("\x1b[2J")
        == check_client_id("é")
        == ""
    )
