"""What the daemon measures: how long the steps of requests take, and the traffic by tenant and model.

`prefixd/v1/admin.proto` describes each figure, at the field of the same name in `Timings` or `TrafficStats`.
"""

from __future__ import annotations

from prefixd.base.tiers import Tier
from prefixd.observability.histogram import Histogram, LabelledCounter, bounds

_WHO = ("tenant", "model")


class Timings:
    """Histograms of seconds. Used from the event loop alone."""

    def __init__(self) -> None:
        self.first_token_s = Histogram(bounds(0.01, 100.0), _WHO)
        self.between_tokens_s = Histogram(bounds(0.001, 2.5), _WHO)
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

    def ask(self, tenant: str, model: str, tokens: int) -> None:
        """Counts prompt tokens that were asked for."""
        self.asked_tokens.add(tokens, tenant, model)

    def find(self, tenant: str, model: str, tokens: list[int]) -> None:
        """Counts prompt tokens that were found, by tier."""
        for tier in Tier:
            if tokens[tier]:
                self.hit_tokens.add(tokens[tier], tenant, model, tier.label)


class Measurements:
    """All measurements of a daemon."""

    def __init__(self) -> None:
        self.timings = Timings()
        self.traffic = Traffic()
