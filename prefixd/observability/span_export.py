"""Sends requests that have ended as spans to an OpenTelemetry collector (OTLP over gRPC), in a thread of its own.

A request is a span from its arrival to its end, within the caller's span if it sent a `traceparent`; each stage of its
record is a span within it. Spans are made after the fact, from the record's times: while a request runs nothing is done
for them, and at its end the event loop puts the record into a bounded queue.

Needs the extra `otel`; import this module only where spans are wanted.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

import prefixd
from prefixd.base.tiers import Tier
from prefixd.observability.request_record import Kind, RequestRecord, Value
from prefixd.observability.trace_context import TraceContext

log = logging.getLogger(__name__)

MOST_WAITING = 2048
"""Requests that wait to be sent; further ones are dropped and counted."""
_BATCH = 64
"""Requests in one message, at most: with 48 stages each, some 3,000 spans."""
_PERIOD_S = 1.0
_TIMEOUT_S = 10.0
_LAST_S = 3.0
"""At the daemon's end the collector has this long for what waits."""


@dataclass(slots=True)
class SpanCounts:
    """What became of spans since the start."""

    exported_spans: int = 0
    """Spans that the collector has taken."""
    failed_spans: int = 0
    """Spans that it has not taken, after repeated tries."""
    dropped_requests: int = 0
    """Requests whose spans were not made, since too many waited, or since it failed."""


class SpanExport:
    """Turns ended requests into spans and sends them.

    Args:
        exporter: sends them; it may wait, in the thread.
        ratio: the share of requests to record, of those that come without a `traceparent`; with one, its flag decides.
        most_waiting: requests that wait to be sent.
        period_s: seconds between two messages.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        ratio: float = 1.0,
        most_waiting: int = MOST_WAITING,
        period_s: float = _PERIOD_S,
    ) -> None:
        self.counts = SpanCounts()
        self._exporter = exporter
        self._most_waiting = most_waiting
        self._period_s = period_s
        self._waiting: deque[RequestRecord] = deque()
        self._made: list[ReadableSpan] = []
        resource = Resource.create({"service.name": "prefixd", "service.version": prefixd.__version__})
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)), resource=resource, shutdown_on_exit=False
        )
        provider.add_span_processor(_Collected(self._made))
        self._tracer = provider.get_tracer("prefixd", prefixd.__version__)
        self._closing = threading.Event()
        self._works = True
        self._thread = threading.Thread(target=self._run, name="prefixd-spans", daemon=True)

    def start(self) -> None:
        """Starts the thread. Raises RuntimeError if the system gives none."""
        self._thread.start()

    def take(self, record: RequestRecord) -> None:
        """Queues an ended request: a listener of `RequestLog.ended`."""
        if record.trace is not None and not record.trace.sampled:
            return
        if len(self._waiting) >= self._most_waiting:
            self.counts.dropped_requests += 1
        else:
            self._waiting.append(record)

    def close(self) -> None:
        """Sends what waits, for a few seconds at most, and ends the thread. Blocks."""
        self._closing.set()
        self._thread.join(_LAST_S)
        self._exporter.shutdown()  # ends repeated tries
        self._thread.join(1.0)

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(self._period_s)
            while self._waiting:
                self._send()

    def _send(self) -> None:
        """Sends the spans of the requests that have waited longest, in one message."""
        spans, failure = list[ReadableSpan](), ""
        for _ in range(min(_BATCH, len(self._waiting))):
            record = self._waiting.popleft()
            try:
                self._make_spans(record)
            except Exception:  # one record must not end the thread, nor take the others' spans along
                self.counts.dropped_requests += 1
                log.exception("request %s has no spans", record.id, extra={"request_id": record.id})
            else:
                spans += self._made
            self._made.clear()
        if not spans:
            return
        try:
            if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
                failure = "the collector did not take them"
        except Exception as error:  # whatever the library raises must not end the thread
            failure = f"{type(error).__name__}: {error}"
        if failure:
            self.counts.failed_spans += len(spans)
            if self._works:
                log.warning(
                    "spans are lost: %s; is tracing.endpoint right, and does a collector listen there?", failure
                )
        else:
            self.counts.exported_spans += len(spans)
            if not self._works:
                log.info("spans arrive at the collector again")
        self._works = not failure

    def _make_spans(self, record: RequestRecord) -> None:
        root = self._tracer.start_span(
            f"prefixd.{record.method}",
            _within(record.trace),
            trace.SpanKind.SERVER,
            _attributes(record),
            start_time=_unix_ns(record, record.arrival_s),
        )
        if not root.is_recording():
            return
        ended_s = record.arrival_s if record.ended_s is None else record.ended_s
        inside = trace.set_span_in_context(root)
        for stage in record.stages:
            span = self._tracer.start_span(
                f"prefixd.{stage.name}",
                inside,
                attributes={f"prefixd.{name}": value for name, value in stage.attributes.items()},
                start_time=_unix_ns(record, stage.start_s),
            )
            span.end(_unix_ns(record, ended_s if stage.end_s is None else stage.end_s))
        if record.first_token_s is not None:
            root.add_event("first_token", timestamp=_unix_ns(record, record.first_token_s))
        if record.outcome == "failed":
            root.set_status(trace.StatusCode.ERROR, record.reason)
        root.end(_unix_ns(record, ended_s))


class _Collected(SpanProcessor):
    """Appends each recorded span that has ended to a list."""

    def __init__(self, spans: list[ReadableSpan]) -> None:
        self._spans = spans

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is done for spans that are not complete."""

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)


def open_export(endpoint: str, ratio: float) -> SpanExport:
    """Starts to send spans to a collector, such as http://127.0.0.1:4317; https:// encrypts."""
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_TIMEOUT_S)
    # It logs each try of each message; `SpanExport` says once that messages are lost, and counts.
    logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
    export = SpanExport(exporter, ratio)
    export.start()
    return export


def _within(caller: TraceContext | None) -> Context:
    if caller is None:
        return Context()
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if caller.sampled else trace.TraceFlags.DEFAULT)
    parent = trace.SpanContext(int(caller.trace_id, 16), int(caller.span_id, 16), is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


def _unix_ns(record: RequestRecord, time_s: float) -> int:
    return int(record.arrival_unix_s * 1e9) + round((time_s - record.arrival_s) * 1e9)


def _attributes(record: RequestRecord) -> dict[str, Value]:
    """What `prefixd why` shows of a request, in OpenTelemetry's words where there are some."""
    found: dict[str, Value] = {
        "rpc.system": "grpc",
        "rpc.method": record.method,
        "prefixd.request_id": record.id,
        "prefixd.tenant": record.tenant,
        "prefixd.outcome": record.outcome,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
    }
    if record.kind is Kind.GENERATE:
        found["gen_ai.usage.output_tokens"] = record.output_tokens
        found["prefixd.hit_tokens"] = record.cached_tokens
    else:
        found["prefixd.blocks"] = record.blocks
    found |= {
        f"prefixd.found_tokens.{tier.name.lower()}": record.found_tokens[tier]
        for tier in Tier
        if record.found_tokens[tier]
    }
    if record.status:
        found["rpc.grpc.status"] = record.status
    if record.degraded:
        found["prefixd.degraded"] = ", ".join(record.degraded)
    if record.left_out:
        found["prefixd.stages_left_out"] = record.left_out
    return found
