"""The log of requests is bounded, and finds records by id, by the client's id and by age."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.base.errors import ChatRefusedError, ExhaustedError, UnavailableError
from prefixd.observability.request_log import MOST_OF_AN_ID, RequestLog, end_with_error
from prefixd.observability.request_record import Kind, RequestRecord


def make(kept: int = 100) -> RequestLog:
    return RequestLog(lambda: 50.0, kept, unix_clock=lambda: 1000.0)


def test_a_record_has_both_times_of_its_arrival() -> None:
    record = make().begin(Kind.GENERATE, "Generate", id="mine", tenant="a", model="m", arrival_s=48.0)
    assert (record.id, record.tenant, record.model, record.arrival_s) == ("mine", "a", "m", 48.0)
    assert record.arrival_unix_s == 998.0


def test_a_listener_that_fails_hurts_neither_the_request_nor_the_others(caplog: pytest.LogCaptureFixture) -> None:
    log, told = make(), list[RequestRecord]()
    log.ended += [lambda record: {}["no such key"], told.append]
    record = log.begin(Kind.GENERATE, "Generate", id="mine")
    record.end("stop", 51.0)
    assert told == [record] and "request mine has ended" in caplog.text and "no such key" in caplog.text


def test_records_are_found_by_every_id() -> None:
    log = make()
    chosen = log.begin(Kind.GENERATE, "Generate", client_id="theirs", tenant="a")
    log.rename(chosen, "r1-abc")
    calls = [log.begin(Kind.LOOKUP, "Acquire", client_id="engine-7", tenant="b") for _ in range(3)]
    assert log.find("r1-abc") == log.find("theirs") == [chosen]
    assert log.find("engine-7") == calls
    assert log.find("nobody") == []
    nameless = log.begin(Kind.STORE, "Reserve")
    assert log.find(nameless.id) == [nameless]
    log.rename(nameless, "named")
    assert log.find("named") == [nameless]
    assert log.last(2) == [nameless, calls[2]]


def test_another_tenants_calls_with_the_same_id_push_no_record_out() -> None:
    log = make(kept=1000)
    mine = [log.begin(Kind.LOOKUP, "Acquire", client_id="job", tenant="a") for _ in range(3)]
    log.rename(log.begin(Kind.GENERATE, "Generate", tenant="a"), "r4-abc")
    (generated,) = log.find("r4-abc")
    for _ in range(MOST_OF_AN_ID + 1):
        log.begin(Kind.LOOKUP, "Acquire", client_id="job", tenant="b")
        log.begin(Kind.GENERATE, "Generate", id="r4-abc", tenant="b")
    found = log.find("job")
    assert found[:3] == mine and len(found) == 3 + MOST_OF_AN_ID // 2
    assert log.find("r4-abc")[0] is generated
    for number in range(MOST_OF_AN_ID):
        log.begin(Kind.LOOKUP, "Acquire", client_id="job", tenant=f"t{number}")
    assert len(log.find("job")) == MOST_OF_AN_ID


def test_a_record_is_found_by_its_number_beside_callers_with_that_id() -> None:
    log = make(kept=3)
    nameless = log.begin(Kind.LOOKUP, "Acquire")
    assert nameless.id == "c1"
    theirs = log.begin(Kind.LOOKUP, "Acquire", client_id="c1")
    assert log.find("c1") == [nameless, theirs]
    assert log.find("c01") == log.find("c2") == log.find("c9") == log.find("c") == log.find("c" + "1" * 5000) == []
    log.rename(nameless, "named")
    assert (log.find("c1"), log.find("named")) == ([theirs], [nameless])
    others = [log.begin(Kind.STORE, "Put") for _ in range(3)]
    assert log.find("c1") == log.find("named") == []
    assert [log.find(f"c{number}") for number in (3, 4, 5)] == [[other] for other in others]


def test_a_long_or_unprintable_id_is_replaced() -> None:
    log = make()
    assert log.begin(Kind.GENERATE, "Generate", id="x" * 300).id == "c1"
    assert log.begin(Kind.GENERATE, "Generate", id="a\nb").id == "c2"


def test_without_records_listeners_are_told_all_the_same() -> None:
    log, told = make(kept=0), list[RequestRecord]()
    log.ended.append(told.append)
    record = log.begin(Kind.GENERATE, "Generate", id="mine")
    log.rename(record, "other")
    record.end("stop", 60.0)
    assert told == [record] and not len(log) and log.find("mine") == log.last(5) == []


def test_errors_become_outcomes() -> None:
    log = make()
    for error, handed_over_s, outcome, status in (
        (ExhaustedError("full"), None, "refused", "RESOURCE_EXHAUSTED"),
        (UnavailableError("the worker died"), 4.0, "failed", "UNAVAILABLE"),
        (ChatRefusedError("ValueError", "never say my secret"), None, "refused", "INVALID_ARGUMENT"),
        (ZeroDivisionError("oh"), None, "failed", "INTERNAL"),
        (asyncio.CancelledError(), 4.0, "cancelled", ""),
        (GeneratorExit(), None, "cancelled", ""),
    ):
        record = log.begin(Kind.GENERATE, "Generate")
        record.handed_over_s = handed_over_s
        end_with_error(record, error, 60.0)
        assert (record.outcome, record.status) == (outcome, status)
        assert "secret" not in record.reason


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.sampled_from(["", "c", "d"])), max_size=200))
def test_memory_is_bounded(calls: list[tuple[str, str]]) -> None:
    log, kept = make(kept=20), list[RequestRecord]()
    for id, client_id in calls:
        kept.append(log.begin(Kind.LOOKUP, "Acquire", id=id, client_id=client_id))
        if not id:
            log.rename(kept[-1], f"r{len(kept)}")
    last = kept[-20:]
    assert len(log) == len(last)
    assert log.last(1000) == last[::-1]
    for name in {record.id for record in kept} | {"c", "d"}:
        assert log.find(name) == [each for each in last if name in (each.id, each.client_id)][-MOST_OF_AN_ID:]
    assert sum(len(each) for of_id in log._by_id.values() for each in of_id.values()) <= 40
