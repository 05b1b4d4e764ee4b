"""vLLM's KV connector to prefixd.

vLLM makes one connector in its scheduler's process and one in every worker's. The first decides (`SchedulerHalf`), the
others copy (`WorkerHalf`). The first sends `Orders` with every step, and the others answer with a `Report`. `releases`
has the differences between releases of vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.platforms import current_platform

from prefixd.integrations.engine.waiting.seen_prefix import SeenPrefix
from prefixd.integrations.vllm.contract import RELEASE
from prefixd.integrations.vllm.geometry import (
    check_failure_policy,
    computes_from_the_middle,
    cross_layer_layout,
    read_geometry,
)
from prefixd.integrations.vllm.log import log
from prefixd.integrations.vllm.options import ConnectorOptions
from prefixd.integrations.vllm.plugin import register
from prefixd.integrations.vllm.scheduler_half import SchedulerHalf
from prefixd.integrations.vllm.stats import PrefixdPromMetrics, PrefixdStats
from prefixd.integrations.vllm.step_messages import Orders, Report
from prefixd.integrations.vllm.worker_half import WorkerHalf
from prefixd_scheduler import Distance

RELEASE.install()

register()  # for users that give the module's path, where VLLM_PLUGINS leaves the entry point out


class PrefixdConnector(RELEASE.ReleaseConnector):
    """Loads and saves vLLM's KV blocks in prefixd. `ConnectorOptions` are its options, docs/vllm.md is the guide.

    Raises ConfigError, which ends vLLM's start, for a configuration that cannot work.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.options = ConnectorOptions.parse(self._kv_transfer_config.kv_connector_extra_config)
        if role == KVConnectorRole.WORKER:
            # MultiConnector gives its children copies of vLLM's configuration. The original is set while workers start.
            check_failure_policy((get_current_vllm_config_or_none() or vllm_config).kv_transfer_config)
        self.geometry = read_geometry(vllm_config, kv_cache_config, self.options)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if not computes_from_the_middle(vllm_config):
            log.warning(
                "prefix caching and chunked prefill are both off: vLLM computes prompts from their start only and "
                "runs without prefixd."
            )
        elif self.geometry is None:
            log.warning("prefixd does not keep models with states alone, nor KV in host memory: vLLM runs without it.")
        elif role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config, self.geometry, self.options)
        else:
            self._worker = WorkerHalf(vllm_config, kv_cache_config, self.geometry, self.options)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that was not saved is computed again."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True with `load` = "layerwise": layers that wait for their bytes must not be captured together."""
        return ConnectorOptions.parse(extra_config).load == "layerwise"

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """With `cross_layer_blocks` the layout with the layers of a block together; vLLM takes another, with a warning,
        where its attention cannot read that."""
        if not ConnectorOptions.parse(vllm_config.kv_transfer_config.kv_connector_extra_config).cross_layer_blocks:
            return None
        # FlashInfer's kernels on Blackwell, the only ones with several layouts that prefer one.
        return cross_layer_layout(vllm_config, current_platform.is_device_capability_family(100))

    # -- in the scheduler's process -------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.add_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.find_prefix(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.start_load(request, blocks.get_block_ids(), num_external_tokens)

    def hit_distances(self, request: Any, tokens: int) -> dict[Distance, int]:
        """For `releases`: the loaded tokens of a request by the distance of their tier."""
        return {} if self._scheduler is None else self._scheduler.hit_distances(request, tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Orders() if self._scheduler is None else self._scheduler.make_orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and report is not None:
            self._scheduler.handle_report(report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finish_request(request, block_ids)
        return False, None  # False: vLLM may free the blocks; those with saves under way are pinned

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.frees_soon

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.needs_steps

    def take_events(self) -> Iterable[KVCacheEvent]:
        events = None if self._scheduler is None else self._scheduler.events
        return () if events is None else events.take_events()

    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.reset_cache()
        return True

    def seen_prefix(self, request_id: str) -> SeenPrefix | None:
        """The last answer of prefixd about a waiting request's prompt; None without a question or an answer. Never
        waits."""
        return None if self._scheduler is None else self._scheduler.lookups.seen(request_id)

    def prepare(self, request: Any, local_tokens: int) -> None:
        """Starts the lease of a waiting request with a turn that is near. Never waits.

        vLLM itself asks for one only with tokens left in a step, which is seldom with a long prompt in chunks.
        """
        if self._scheduler is not None:
            self._scheduler.prepare(request, local_tokens)

    def prepared_requests(self) -> int:
        """The number of waiting requests to call `prepare` for."""
        return 0 if self._scheduler is None else self._scheduler.lookups.prefetched

    def ready_s(self, request: Any, local_tokens: int, seen: SeenPrefix) -> float:
        """Estimated seconds of loading and computing until a waiting request's first token, if vLLM's own cache holds
        `local_tokens` of its prompt and prefixd the prefix `seen`."""
        return math.inf if self._scheduler is None else self._scheduler.ready_s(request, local_tokens, seen)

    # -- in a worker's process ------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None and self.options.load == "layerwise":
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: whole blocks are saved once the step has computed all their layers."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_saves(self._orders())

    def loads_ended(self) -> tuple[set[str], dict[str, set[int]]]:
        """For `releases`: requests with ended loads, and by request vLLM's blocks of loads that failed as a whole."""
        if self._worker is None:
            return set(), {}
        # Before 0.31 vLLM waits for saves only in steps that compute; in those it asks this before a draft computes.
        if (orders := self._orders()).idle:
            self._worker.start_saves(orders)
        return self._worker.transfers.take_received()

    def blocks_failed(self) -> set[int]:
        """For `releases`: vLLM's blocks that did not come, of loads that can be used in part."""
        return set() if self._worker is None else self._worker.transfers.take_failed_ids()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._worker is None:
            return None
        orders, outcomes = self._orders(), self._worker.transfers.take_outcomes()
        packings = (self._worker.packing,) if orders.ask_packing else ()
        return Report(outcomes, orders.step, packings) if outcomes or packings or not orders.idle else None

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    # -- metrics --------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> PrefixdStats | None:
        half = self._worker or self._scheduler
        counts = None if half is None else half.counters.take()
        return PrefixdStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PrefixdStats:
        return PrefixdStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PrefixdPromMetrics:
        return PrefixdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
