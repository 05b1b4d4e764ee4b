"""Requests that have ended are measured."""

from __future__ import annotations

from prefixd.observability.measurements import Measurements
from prefixd.observability.request_log import RequestLog
from prefixd.observability.request_record import UNKNOWN_MODEL, Kind, StageName
from prefixd.observability.trace_context import TraceContext


def test_a_request_counts_once_when_it_has_ended() -> None:
    measurements, log = Measurements(), RequestLog(lambda: 100.0)
    log.ended.append(measurements.count_request)
    trace = TraceContext("a" * 32, "b" * 16, True)
    record = log.begin(Kind.GENERATE, "Generate", tenant="blue", model="qwen", arrival_s=90.0, trace=trace)
    record.note(StageName.LOAD, 90.5, 91.0, urgency="prefetch", outcome="complete")
    record.note(StageName.LOAD, 91.0, 92.0, urgency="demand", outcome="complete")
    record.handed_over_s, record.first_token_s, record.output_tokens = 94.0, 95.0, 11
    record.end("stop", 100.0)
    record.end("failed", 101.0)
    timings, traffic, who = measurements.timings, measurements.traffic, ("blue", "qwen")
    assert dict(traffic.requests) == {(*who, "stop"): 1}
    assert dict(traffic.generated_tokens) == {who: 11}
    for histogram, value in ((timings.first_token_s, 5.0), (timings.queue_s, 4.0), (timings.per_token_s, 0.5)):
        ((labels, series),) = histogram
        assert (labels, series.total, sum(series.counts)) == (who, value, 1)
        assert list(series.exemplars.values()) == [(value, "a" * 32)]
    ((labels, series),) = timings.prefetch_lead_s
    assert (labels, series.total) == (("gpu",), 3.0)


def test_what_did_not_happen_is_not_measured() -> None:
    measurements, log = Measurements(), RequestLog(lambda: 100.0)
    log.ended.append(measurements.count_request)
    refused = log.begin(Kind.GENERATE, "Generate", tenant="blue", model=UNKNOWN_MODEL)
    refused.end("refused", 101.0, status="NOT_FOUND", reason="there is no model")
    one_token = log.begin(Kind.GENERATE, "Generate", tenant="blue", model="qwen")
    one_token.handed_over_s = one_token.first_token_s = 100.5
    one_token.output_tokens = 1
    one_token.end("length", 101.0)
    log.begin(Kind.LOOKUP, "Acquire", tenant="blue", model="engine").end("ok", 101.0)
    assert dict(measurements.traffic.requests) == {
        ("blue", "(unknown)", "refused"): 1,
        ("blue", "qwen", "length"): 1,
    }
    assert not list(measurements.timings.per_token_s)
    assert sum(measurements.timings.first_token_s.counts) == 1


def test_an_engines_trace_shows_its_lookup() -> None:
    measurements, log = Measurements(), RequestLog(lambda: 100.0)
    log.ended.append(measurements.count_request)
    measurements.timings.lookup_s.observe(0.002, "blue", "engine")
    for sampled in (False, True):
        trace = TraceContext("a" * 32 if sampled else "b" * 32, "b" * 16, sampled)
        record = log.begin(Kind.LOOKUP, "Acquire", tenant="blue", model="engine", trace=trace)
        record.note(StageName.MATCH, 100.0, 100.002)
        record.end("ok", 101.0)
    ((_, series),) = measurements.timings.lookup_s
    assert sum(series.counts) == 1, "the cache has counted it"
    ((value, trace_id),) = series.exemplars.values()
    assert (round(value, 4), trace_id) == (0.002, "a" * 32)
