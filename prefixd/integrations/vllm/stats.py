"""Hands the connector's counters to vLLM's log and metrics.

Scheduler and workers each have counters; vLLM carries a worker's counts to the front end with every step, sums them
over the ranks, and serves them as Prometheus counters.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from prefixd.integrations.engine.connector_counters import COUNTERS


class PrefixdStats(KVConnectorStats):
    """Counts since the last report, by name."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class PrefixdPromMetrics(KVConnectorPromMetrics):
    """The same counts as Prometheus counters `vllm:prefixd_<name>`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._children: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(name=f"vllm:prefixd_{name}", documentation=text, labelnames=labelnames)
            self._children[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            self._children[name][engine_idx].inc(value)
