"""Messages between the connector's scheduler half and worker half, which vLLM carries with its steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from prefixd.integrations.engine.jobs import LoadJob, Outcomes, SaveJob
from prefixd.integrations.vllm.naming.page_packing import Packing


@dataclass
class Orders(KVConnectorMetadata):
    """Loads and saves that the workers make with one step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    idle: bool = False
    """The step computes nothing."""
    step: int = 0
    """Its number."""
    ask_packing: bool = False
    """Asks the workers to report how their KV bytes lie in a page, which the scheduler does not know yet."""


@dataclass
class Report(KVConnectorWorkerMetadata):
    """Jobs that the workers have ended, and the number of the last step that has computed."""

    outcomes: Outcomes
    step: int
    packings: tuple[Packing, ...] = ()
    """How the workers' KV bytes lie in a page, in the order of ranks; empty unless asked for."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Report)
        self.outcomes.merge(other.outcomes)
        self.packings += other.packings
        return self
