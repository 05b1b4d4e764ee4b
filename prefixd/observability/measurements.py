"""What the daemon measures: how long the steps of requests take, and the traffic by tenant and model.

`prefixd/v1/admin.proto` describes each figure, at the field of the same name in `Timings` or `TrafficStats`.
"""

from __future__ import annotations

from prefixd.base.tiers import Tier
from prefixd.observability.histogram import Histogram, LabelledCounter, bounds
from prefixd.observability.request_record import Kind, RequestRecord, StageName

_WHO = ("tenant", "model")
_TIERS = tuple((int(tier), tier.label) for tier in Tier)


class Timings:
    """Histograms of seconds. Used from the event loop alone."""

    def __init__(self) -> None:
        self.first_token_s = Histogram(bounds(0.01, 100.0), _WHO)
        self.between_tokens_s = Histogram(bounds(0.001, 10.0), ("model",))
        self.per_token_s = Histogram(bounds(0.001, 2.5), _WHO)
        self.queue_s = Histogram(bounds(0.001, 250.0), _WHO)
        self.lookup_s = Histogram(bounds(0.0001, 2.5), _WHO)
        self.load_s = Histogram(bounds(0.0005, 25.0), ("tier", "urgency"))
        self.save_s = Histogram(bounds(0.001, 100.0), ("step",))
        self.prefetch_lead_s = Histogram((0.0, *bounds(0.001, 100.0)), ("tier",))
        self.lease_s = Histogram(bounds(0.001, 1000.0), ("tenant", "end"))


class Traffic:
    """Counts by tenant and model."""

    def __init__(self) -> None:
        self.requests = LabelledCounter((*_WHO, "outcome"))
        self.generated_tokens = LabelledCounter(_WHO)
        self.asked_tokens = LabelledCounter(_WHO)
        self.hit_tokens = LabelledCounter((*_WHO, "tier"))
        self.stored_bytes = LabelledCounter(_WHO)

    def ask(self, who: tuple[str, str], tokens: int) -> None:
        """Counts prompt tokens that were asked for."""
        self.asked_tokens.add(tokens, *who)

    def find(self, who: tuple[str, str], tokens: list[int]) -> None:
        """Counts prompt tokens that were found, by tier."""
        for level, tier in _TIERS:
            if tokens[level]:
                self.hit_tokens.add(tokens[level], *who, tier)


class Measurements:
    """All measurements of a daemon."""

    def __init__(self) -> None:
        self.timings = Timings()
        self.traffic = Traffic()

    def count_request(self, record: RequestRecord) -> None:
        """Counts a request to a worker that has ended (`RequestLog.ended`).

        The cache itself has counted the lookups of engines; their traces become exemplars.
        """
        trace_id = record.trace.trace_id if record.trace is not None and record.trace.sampled else ""
        if record.kind is not Kind.GENERATE:
            if trace_id and record.kind is Kind.LOOKUP and (match_s := record.seconds(StageName.MATCH)):
                self.timings.lookup_s.show(match_s, record.tenant, record.model, trace_id=trace_id)
            return
        timings, traffic = self.timings, self.traffic
        who = record.tenant, record.model
        traffic.requests.add(1, *who, record.outcome)
        if record.output_tokens:
            traffic.generated_tokens.add(record.output_tokens, *who)
        if record.queue_s is not None:
            timings.queue_s.observe(record.queue_s, *who, trace_id=trace_id)
        if record.ttft_s is not None:
            timings.first_token_s.observe(record.ttft_s, *who, trace_id=trace_id)
        if (token_s := _per_token_s(record)) is not None:
            timings.per_token_s.observe(token_s, *who, trace_id=trace_id)
        for stage in record.stages:
            ahead = stage.name is StageName.LOAD and stage.attributes.get("urgency") == "prefetch"
            complete = stage.attributes.get("outcome") == "complete"
            if ahead and complete and record.handed_over_s is not None and stage.end_s is not None:
                timings.prefetch_lead_s.observe(max(record.handed_over_s - stage.end_s, 0.0), Tier.GPU.label)


def _per_token_s(record: RequestRecord) -> float | None:
    """Mean seconds between two tokens of a sequence of the request; None with fewer than two tokens a sequence."""
    tokens = record.output_tokens / record.sequences
    if record.first_token_s is None or record.ended_s is None or tokens < 2:
        return None
    return (record.ended_s - record.first_token_s) / (tokens - 1)
