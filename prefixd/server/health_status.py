"""Sets the gRPC health status of the daemon, its services, its tiers and its models."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2

from prefixd.cache import Tiers
from prefixd.server.rpc.health_service import Health
from prefixd.serving.models.models import Models
from prefixd.serving.models.worker_process import WorkerState
from prefixd.v1 import admin_pb2, cache_pb2, inference_pb2

TIER_HEALTH = "prefixd.tier."
"""Stands before a tier's name (`prefixd.tier.disk`): the health service that serves while the tier works fully."""
MODEL_HEALTH = "prefixd.model."
"""Stands before a model's name if there are several: the health service that serves unless the model's worker has
failed."""
_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
SERVICES = (
    cache_pb2.DESCRIPTOR.services_by_name["PrefixCache"].full_name,
    _INFERENCE,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
)


class HealthStatus:
    """Sets the status of every health service from the state of tiers and models.

    The status of a tier is NOT_SERVING while it is out of service or shrunk, and that of Inference while no worker
    serves; the other services keep theirs. So a load balancer that then sends requests elsewhere does not take the
    cache away from its other clients.

    Args:
        health: the gRPC service.
        tiers: the cache's tiers.
        models: the models; None in a sidecar.
        draining: set when the daemon takes no new work.
    """

    def __init__(self, health: Health, tiers: Tiers, models: Models | None, draining: asyncio.Event) -> None:
        self._health = health
        self._tiers = tiers
        self._models = models
        self._draining = draining

    def update(self) -> None:
        """Sets every status as of now."""
        draining, models = self._draining.is_set(), self._models
        well = {service: not draining for service in ("", *SERVICES)}
        well[_INFERENCE] &= models is None or models.serves
        if models is not None and len(models.hosts) > 1:
            for name, host in models.hosts.items():
                well[f"{MODEL_HEALTH}{name}"] = not (draining or host.worker.failure)
        for tier in self._tiers.existing:
            well[f"{TIER_HEALTH}{tier.name}"] = not (draining or self._tiers.troubles.of_tier(tier))
        for service, serves in well.items():
            status = health_pb2.HealthCheckResponse
            self._health.set(service, status.SERVING if serves else status.NOT_SERVING)

    def not_ready(self) -> list[str]:
        """Returns the reasons why the daemon takes no work now; none if it does. A model that failed is none while
        another one serves."""
        if self._draining.is_set():
            return ["the daemon drains and takes no new work"]
        if self._models is None:
            return []
        workers = {name: host.worker for name, host in self._models.hosts.items()}
        if any(worker.state is WorkerState.READY for worker in workers.values()):
            return []
        return [
            f"the worker of {name} was given up ({worker.failure})" if worker.failure else f"the model {name} loads"
            for name, worker in workers.items()
        ]
