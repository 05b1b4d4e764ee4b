"""The names that prefixd uses of every release of vLLM, and the methods of the classes that it derives from."""

from __future__ import annotations

import vllm

from prefixd.integrations.engine.contract import BaseClass, Contract, names_in
from prefixd.integrations.vllm.log import log
from prefixd.integrations.vllm.releases import RELEASES, WORKS_WITH

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:"

NAMES = frozenset[str]().union(
    names_in(
        _CONNECTOR,
        "KVConnectorBase_V1 KVConnectorMetadata KVConnectorRole KVConnectorWorkerMetadata "
        "SupportsHMA KVConnectorBase_V1._kv_transfer_config KVConnectorBase_V1._get_connector_metadata",
    ),
    names_in(
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics:",
        "KVConnectorStats.data KVConnectorPromMetrics._counter_cls",
    ),
    names_in("vllm.config:", "get_current_vllm_config_or_none"),
    names_in("vllm.distributed.kv_transfer.kv_connector.factory:", "KVConnectorFactory.register_connector"),
    names_in("vllm.distributed:", "get_tensor_model_parallel_rank"),
    names_in("vllm.platforms:", "current_platform"),
    names_in("vllm.config:ModelConfig.", "is_hybrid use_mla"),
    names_in(
        "vllm.v1.core.kv_cache_utils:",
        "resolve_kv_cache_block_sizes resolve_block_hashes generate_block_hash_extra_keys hash_block_tokens "
        "maybe_convert_block_hash",
    ),
    names_in("vllm.utils.hashing:", "get_hash_fn_by_name"),
    names_in("vllm.distributed.kv_events:", "BlockRemoved BlockStored KVCacheEvent MEDIUM_CPU MEDIUM_STORAGE"),
    names_in("vllm.v1.core.block_pool:BlockPool.", "blocks touch free_blocks get_cached_block hash_block_size"),
    names_in(
        "vllm.v1.core.sched.output:SchedulerOutput.",
        "num_scheduled_tokens total_num_scheduled_tokens preempted_req_ids kv_connector_block_state has_sync_kv_loads",
    ),
    names_in("vllm.v1.core.sched.output:KVConnectorBlockState.", "boundary_state_offloads"),
    names_in("vllm.v1.outputs:KVConnectorOutput.", "kv_connector_worker_meta"),
    names_in(
        "vllm.v1.request:Request.",
        "request_id prompt_token_ids prompt_embeds all_token_ids block_hashes num_tokens num_computed_tokens "
        "num_in_flight_tokens num_preemptions resumable skip_reading_prefix_cache cache_salt lora_request "
        "pooling_params sampling_params kv_transfer_params mm_features arrival_time status",
    ),
    names_in(
        "vllm.v1.kv_cache_interface:", "FullAttentionSpec KVCacheSpec.prefix_cacheable KVCacheSpec.page_size_bytes"
    ),
    names_in(
        "vllm.v1.kv_cache_interface:KVCacheConfig.", "num_blocks kv_cache_tensors kv_cache_groups transfer_group_ids"
    ),
    names_in("vllm.v1.kv_cache_interface:KVCacheTensor.", "layers layer_stride block_stride offset"),
    names_in("vllm:", "envs __version__"),
)

SCHEDULER_NAMES = frozenset[str]().union(
    names_in("vllm.v1.core.sched.async_scheduler:", "AsyncScheduler"),
    names_in("vllm.v1.core.sched.request_queue:", "RequestQueue SchedulingPolicy"),
    names_in(
        "vllm.v1.core.sched.scheduler:Scheduler.",
        "vllm_config connector kv_cache_manager waiting running policy max_num_running_reqs hash_block_size schedule "
        "shutdown",
    ),
    names_in("vllm.v1.core.kv_cache_manager:KVCacheManager.", "coordinator prefix_cache_lookup_enabled"),
    names_in("vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.", "single_type_managers"),
    names_in(
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.",
        "block_pool block_size kv_cache_group_id kv_cache_spec",
    ),
)

CALLED = names_in(
    "",
    "requires_kv_delivery requires_piecewise_for_cudagraph get_required_kvcache_layout bind_gpu_block_pool "
    "on_new_request get_num_new_matched_tokens update_state_after_alloc build_connector_meta update_connector_output "
    "request_finished reset_cache take_events has_pending_push_work register_kv_caches start_load_kv "
    "wait_for_layer_load save_kv_layer wait_for_save build_connector_worker_meta shutdown get_kv_connector_stats "
    "build_kv_connector_stats build_prom_metrics",
)

# Defaults that are right for prefixd: it copies no partial blocks, needs no memory of its own from vLLM, has no state
# of captured graphs, and holds no block after its request but by the block's reference count. Handshake metadata are
# for other engines.
KNOWN = names_in(
    "",
    "role bind_connector_metadata clear_connector_metadata has_connector_metadata get_mem_pool_context "
    "set_host_xfer_buffer_ops finish_forward reset_capture_state handle_preemptions get_finished get_transfer_results "
    "get_kv_connector_kv_cache_events bind_kv_cache_manager get_loaded_kv_cache_group_ids "
    "register_finished_partial_tail get_finished_count supports_sleep_mode "
    "get_handshake_metadata set_xfer_handshake_metadata set_xfer_handshake_metadata_pp_aware "
    "supports_divergent_local_hybrid_hits unregister_kv_caches restore_kv_caches",
)

_QUEUE = names_in(
    "", "add_request pop_request peek_request prepend_request prepend_requests remove_request remove_requests"
)

RELEASE = RELEASES.module_of(vllm.__version__)
"""The module of the installed release."""


def check_connector() -> None:
    """Checks that vLLM has the names that PrefixdConnector uses. Raises ConfigError."""
    base = BaseClass(f"{_CONNECTOR}KVConnectorBase_V1", CALLED | RELEASE.CALLED, KNOWN)
    Contract("vLLM", vllm.__version__, WORKS_WITH, NAMES | RELEASE.NAMES, (base,)).check(log)


def check_scheduler() -> None:
    """Checks the further names that FastestPrefixFirstScheduler uses. Raises ConfigError."""
    queue = BaseClass("vllm.v1.core.sched.request_queue:RequestQueue", _QUEUE)
    Contract("vLLM", vllm.__version__, WORKS_WITH, SCHEDULER_NAMES, (queue,)).check(log)
