"""What the connector's two halves say to each other by way of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from prefixd.integrations.engine.jobs import LoadJob, Outcomes, SaveJob


@dataclass
class Orders(KVConnectorMetadata):
    """What the workers are to do with one step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    idle: bool = False
    """The step computes nothing."""
    step: int = 0
    """Its number."""
    ask_packing: bool = False
    """The scheduler does not know yet how the workers' KV bytes lie; their report is to say it."""


@dataclass
class Report(KVConnectorWorkerMetadata):
    """What the workers have ended, with every step that computes something: also that it has."""

    outcomes: Outcomes
    step: int
    packings: tuple[str, ...] = ()
    """How the workers' KV bytes lie, as digests in the order of ranks; empty unless asked for."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Report)
        self.outcomes.merge(other.outcomes)
        self.packings += other.packings
        return self
