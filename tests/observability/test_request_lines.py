"""The line of the log for each request that has ended."""

from __future__ import annotations

import logging

import pytest

from prefixd.observability.request_lines import log_request
from prefixd.observability.request_record import Kind, RequestRecord


def record(**more: object) -> RequestRecord:
    made = RequestRecord(id="r1", tenant="acme", model="llama", arrival_s=10.0, outcome="stop", prompt_tokens=78)
    made.hit_tokens = [48, 0, 16, 0]
    made.handed_over_s, made.first_token_s, made.ended_s, made.output_tokens = 10.25, 10.5, 12.0, 9
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_a_request_has_one_line_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "prefixd.observability.request_lines")
    log_request(record())
    (line,) = caplog.records
    assert line.getMessage() == (
        "request r1: Generate of tenant acme, llama: stop after 2.000 s; 78 prompt tokens, "
        "64 cached (gpu 48, disk 16); queued for 0.250 s; first token after 0.500 s; 9 tokens generated"
    )
    assert vars(line)["request_id"] == "r1"
    fields = vars(line)["fields"]
    assert (fields["cached_tokens_disk"], fields["ttft_s"], fields["seconds"]) == (16, 0.5, 2.0)


def test_a_refused_request_has_its_reason_and_a_lookup_its_blocks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "prefixd.observability.request_lines")
    refused = record(outcome="refused", status="RESOURCE_EXHAUSTED", reason="the queue is full", hit_tokens=None)
    refused.handed_over_s = refused.first_token_s = None
    log_request(refused)
    log_request(record(kind=Kind.LOOKUP, method="Acquire", outcome="ok", blocks=4))
    first, second = (line.getMessage() for line in caplog.records)
    assert "refused after 2.000 s; RESOURCE_EXHAUSTED: the queue is full; 78 prompt tokens, 0 cached; 9 tok" in first
    assert second.startswith("request r1: Acquire of tenant acme, llama: ok") and second.endswith("; 4 blocks")


def test_nothing_is_formatted_above_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prefixd.observability.request_lines")
    log_request(record(hit_tokens="no list"))
    assert not caplog.records
