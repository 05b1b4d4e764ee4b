"""Requests as spans: the tree that a collector gets, and what happens when it takes none."""

from __future__ import annotations

from concurrent import futures
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, NamespaceSpec, PartSpec, within_trace
from prefixd.observability.request_log import RequestLog
from prefixd.observability.request_record import Kind, StageName
from prefixd.observability.span_export import SpanExport, open_export
from prefixd.observability.trace_context import TraceContext, parse_traceparent

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NOW_S = 1000.0


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector on the loopback."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}
        self.server = grpc.server(futures.ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def Export(self, request: Any, context: Any) -> Any:
        for each in request.resource_spans:
            self.resource.update({pair.key: pair.value.string_value for pair in each.resource.attributes})
            self.spans += [span for scope in each.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


class Held(SpanExporter):
    """Takes what it is told to."""

    def __init__(self, *results: SpanExportResult | Exception) -> None:
        self.results = list(results)
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Any) -> SpanExportResult:
        result = self.results.pop(0) if self.results else SpanExportResult.SUCCESS
        if isinstance(result, Exception):
            raise result
        self.spans += spans
        return result

    def shutdown(self) -> None:
        pass


class Requests:
    """A log whose records end in an export; its clock stands until it is moved."""

    def __init__(self, export: SpanExport) -> None:
        self.now_s = NOW_S
        self.log = RequestLog(lambda: self.now_s, unix_clock=lambda: 1.7e9)
        self.log.ended.append(export.take)

    def generate(self, trace: TraceContext | None = None, outcome: str = "stop") -> None:
        record = self.log.begin(Kind.GENERATE, "Generate", id="r1", tenant="team-a", model="m", trace=trace)
        record.prompt_tokens, record.output_tokens, record.found_tokens = 40, 7, (0, 0, 32, 0)
        record.note(StageName.QUEUE, NOW_S, NOW_S + 1.0)
        record.note(StageName.LOAD, NOW_S + 0.25, NOW_S + 0.75, tier="disk", blocks=2)
        record.begin(StageName.DECODE, NOW_S + 1.0)
        record.first_token_s = NOW_S + 1.0
        self.now_s = NOW_S + 2.0
        record.end(outcome, self.now_s, reason="" if outcome == "stop" else "the worker died")
        self.now_s = NOW_S


def test_a_collector_gets_the_requests_tree_within_the_callers_span() -> None:
    receiver = Receiver()
    try:
        export = open_export(f"http://127.0.0.1:{receiver.port}", 0.0)
        Requests(export).generate(parse_traceparent(f"00-{TRACE}-{PARENT}-01"))
        export.close()
    finally:
        receiver.server.stop(None)
    spans = {span.name: span for span in receiver.spans}
    assert set(spans) == {"prefixd.Generate", "prefixd.queue", "prefixd.load", "prefixd.decode"}
    root = spans.pop("prefixd.Generate")
    assert {span.trace_id.hex() for span in receiver.spans} == {TRACE}
    assert root.parent_span_id.hex() == PARENT and all(span.parent_span_id == root.span_id for span in spans.values())
    at = 1_700_000_000_000_000_000
    assert (root.start_time_unix_nano - at, root.end_time_unix_nano - at) == (0, 2_000_000_000)
    load = spans["prefixd.load"]
    assert (load.start_time_unix_nano - at, load.end_time_unix_nano - at) == (250_000_000, 750_000_000)
    assert {pair.key: pair.value.string_value or pair.value.int_value for pair in load.attributes} == {
        "prefixd.tier": "disk",
        "prefixd.blocks": 2,
    }
    assert spans["prefixd.decode"].end_time_unix_nano == root.end_time_unix_nano
    said = {pair.key: pair.value.string_value or pair.value.int_value for pair in root.attributes}
    assert said["prefixd.request_id"] == "r1" and said["prefixd.tenant"] == "team-a"
    assert said["prefixd.found_tokens.disk"] == 32 and said["gen_ai.usage.output_tokens"] == 7
    assert [(event.name, event.time_unix_nano - at) for event in root.events] == [("first_token", 1_000_000_000)]
    assert receiver.resource["service.name"] == "prefixd" and receiver.resource["service.version"]
    assert export.counts.exported_spans == 4 and not export.counts.failed_spans


def test_the_caller_decides_and_for_others_the_ratio() -> None:
    exporter = Held()
    export = SpanExport(exporter, 0.0)
    requests = Requests(export)
    requests.generate(TraceContext(TRACE, PARENT, sampled=False))
    requests.generate()
    assert len(export._waiting) == 1, "whoever does not record its trace costs nothing"
    export.start()
    export.close()
    assert exporter.spans == []
    export = SpanExport(exporter, 1.0)
    Requests(export).generate()
    export.start()
    export.close()
    assert len(exporter.spans) == 4 and exporter.spans[-1].parent is None


def test_what_the_queue_cannot_hold_is_dropped_and_counted() -> None:
    export = SpanExport(Held(), most_waiting=2)
    requests = Requests(export)
    for _ in range(5):
        requests.generate()
    assert export.counts.dropped_requests == 3
    export.start()
    export.close()
    assert export.counts.exported_spans == 8


def test_a_failed_request_is_an_error() -> None:
    exporter = Held()
    export = SpanExport(exporter)
    Requests(export).generate(outcome="failed")
    export.start()
    export.close()
    assert not exporter.spans[-1].status.is_ok and exporter.spans[-1].status.description == "the worker died"


def test_lost_spans_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    export = SpanExport(Held(SpanExportResult.FAILURE, RuntimeError("broken"), SpanExportResult.SUCCESS))
    requests = Requests(export)
    with caplog.at_level("INFO"):
        for _ in range(3):
            requests.generate()
            export._send()
    assert (export.counts.failed_spans, export.counts.exported_spans) == (8, 4)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "spans are lost",
        "spans arrive at the collector again",
    ]


def test_a_record_without_spans_takes_no_other_along(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Held()
    export = SpanExport(exporter)
    requests = Requests(export)
    requests.generate()
    export._waiting[0].arrival_unix_s = float("nan")
    requests.generate()
    export.start()
    export.close()
    assert len(exporter.spans) == export.counts.exported_spans == 4
    assert export.counts.dropped_requests == 1 and "request r1 has no spans" in caplog.text


@pytest.mark.slow
def test_an_engines_calls_are_spans_within_its_own() -> None:
    receiver = Receiver()
    settings = {"cpu.bytes": "4MiB", "disk.bytes": 0, "tracing.endpoint": f"http://127.0.0.1:{receiver.port}"}
    tokens, data = list(range(16)), bytes(4 * 1000)
    try:
        with DaemonProcess(settings) as daemon, Client(daemon.address) as client:
            cache = client.register(NamespaceSpec("m", 4, (PartSpec("full", 0, 1000),)))
            with within_trace(f"00-{TRACE}-{PARENT}-01"):
                cache.store(tokens, data)
                with cache.acquire(tokens) as lease:
                    assert lease.blocks == 4
            cache.acquire(tokens).release()
    finally:
        receiver.server.stop(None)
    traced = [span for span in receiver.spans if span.trace_id.hex() == TRACE]
    assert len(traced) < len(receiver.spans), "a call without a trace begins one"
    roots = {span.name: span for span in traced if span.parent_span_id.hex() == PARENT}
    assert set(roots) == {"prefixd.Reserve", "prefixd.Commit", "prefixd.Acquire"}
    children = {
        (next(root for root in roots if roots[root].span_id == span.parent_span_id), span.name)
        for span in traced
        if span.parent_span_id.hex() != PARENT
    }
    assert children >= {
        ("prefixd.Reserve", "prefixd.reserve"),
        ("prefixd.Commit", "prefixd.commit"),
        ("prefixd.Acquire", "prefixd.match"),
    }
