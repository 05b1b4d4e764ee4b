"""What the connector's two halves say to each other by way of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

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


@dataclass
class Report(KVConnectorWorkerMetadata):
    """What the workers have ended, with every step that computes something: also that it has."""

    outcomes: Outcomes
    step: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        self.outcomes.merge(other.outcomes)
        return self


@dataclass
class Packing(KVConnectorHandshakeMetadata):
    """How a worker's KV bytes lie, as a digest."""

    digest: str
