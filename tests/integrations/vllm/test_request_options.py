"""What a request may ask for in `kv_transfer_params`: what is wrong is named and left out, whatever it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prefixd.client import Retention
from prefixd.integrations.vllm.request_options import (
    NO_REQUEST_OPTIONS,
    RequestOptions,
    read_request_options,
    traceparent_of,
)


def test_both_are_read() -> None:
    asked = {"read_only": True, "retention": [{"start": 0, "end": 1024, "priority": 50, "ttl_s": 3600}]}
    options, wrong = read_request_options({"prefixd": asked, "do_remote_prefill": False}, 5000)
    assert (options, wrong) == (RequestOptions(True, (Retention(50, 0, 1024, 3600),)), [])


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, {"prefixd": {}}, "prefixd", 7])
def test_without_options_there_are_none(params: Any) -> None:
    assert read_request_options(params, 100) == (NO_REQUEST_OPTIONS, [])


def test_ranges_end_with_the_prompt_at_the_latest() -> None:
    ranges = [
        {"priority": 1},
        {"priority": 2, "start": 32},
        {"priority": 3, "end": 4096},
        {"priority": 4, "start": 100},
    ]
    options, wrong = read_request_options({"prefixd": {"retention": ranges}}, 100)
    assert options.retention == (Retention(1, 0, 100), Retention(2, 32, 100), Retention(3, 0, 100))
    assert not wrong


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (7, "prefixd is 7; it must be an object"),
        (["read_only"], "prefixd is ['read_only']; it must be an object"),
        ({"readonly": True}, "prefixd has 'readonly'; there are read_only and retention"),
        ({1: 2}, "prefixd has 1; there are read_only and retention"),
        ({"read_only": "yes"}, "read_only is 'yes'; it must be true or false"),
        ({"read_only": 1}, "read_only is 1; it must be true or false"),
        ({"read_only": None}, "read_only is None; it must be true or false"),
        ({"retention": None}, "retention is None: Input should be a valid list"),
        ({"retention": {"priority": 1}}, "Input should be a valid list"),
        ({"retention": [5]}, "retention.0 is 5: Input should be"),
        ({"retention": [{}]}, "retention.0.priority is {}: Field required"),
        ({"retention": [{"priority": 1}, {"priority": 101}]}, "retention.1.priority is 101: Input should be less"),
        ({"retention": [{"priority": -101}]}, "retention.0.priority is -101: Input should be greater"),
        ({"retention": [{"priority": 1.5}]}, "retention.0.priority is 1.5: Input should be a valid integer"),
        ({"retention": [{"priority": True}]}, "retention.0.priority is True"),
        ({"retention": [{"priority": 1, "start": -1}]}, "retention.0.start is -1"),
        ({"retention": [{"priority": 1, "end": 1 << 40}]}, "retention.0.end is 1099511627776"),
        ({"retention": [{"priority": 1, "start": 5, "end": 5}]}, "end is 5; it must be above start, which is 5"),
        ({"retention": [{"priority": 1, "ttl_s": 0}]}, "retention.0.ttl_s is 0"),
        ({"retention": [{"priority": 1, "ttl_s": float("nan")}]}, "retention.0.ttl_s is nan"),
        ({"retention": [{"priority": 1, "ttl_s": float("inf")}]}, "retention.0.ttl_s is inf"),
        ({"retention": [{"priority": 1, "ttl": 5}]}, "retention.0.'ttl' is 5: Extra inputs are not permitted"),
        ({"retention": [{"priority": 1}] * 65}, "retention has 65 ranges; send at most 64"),
    ],
)
def test_what_is_wrong_is_named_and_left_out(asked: Any, said: str) -> None:
    options, wrong = read_request_options({"prefixd": asked}, 100)
    assert options == NO_REQUEST_OPTIONS
    assert len(wrong) == 1 and said in wrong[0]


def test_what_is_right_beside_it_holds() -> None:
    options, wrong = read_request_options({"prefixd": {"read_only": True, "retention": [{"priority": 1000}]}}, 100)
    assert (options.read_only, options.retention, len(wrong)) == (True, (), 1)
    options, wrong = read_request_options({"prefixd": {"read_only": 0, "retention": [{"priority": 5}]}}, 100)
    assert (options.read_only, options.retention, len(wrong)) == (False, (Retention(5, 0, 100),), 1)


def test_what_is_said_is_short_and_one_line_whatever_was_sent() -> None:
    nasty = "\x1b[2J\n" * 100_000
    for asked in (
        {nasty: 1},
        {"read_only": nasty},
        {"retention": nasty},
        {"retention": [{nasty: 1, "priority": 1}]},
        nasty,
    ):
        _, wrong = read_request_options({"prefixd": asked}, 100)
        assert wrong and all(len(line) < 400 and line.isprintable() for line in wrong)
    _, wrong = read_request_options({"prefixd": {str(number): 1 for number in range(1000)}}, 100)
    assert len(wrong) == 3


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({"traceparent": "00-a-b-01", "tracestate": "x=y"}, "00-a-b-01"),
        ({"tracestate": "x=y"}, ""),
        (None, ""),
        ({"traceparent": 3}, ""),
    ],
)
def test_the_callers_span_is_read(headers: object, found: str) -> None:
    assert traceparent_of(SimpleNamespace(trace_headers=headers)) == found
    assert traceparent_of(SimpleNamespace()) == ""
