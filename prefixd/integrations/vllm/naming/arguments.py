"""Every argument of vLLM, as its configuration has it: in the name of the model, or why not.

Sections are the fields of `VllmConfig` (0.32). A section that cannot change KV at all has one entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from prefixd.integrations.engine.naming.arguments import Argument, ArgumentTable


def _in(section: str, names: str) -> str:
    return " ".join(f"{section}.{name}" for name in names.split())


_ROUNDING = "the same numbers but for the order of sums, which also differs between batches of different sizes"
_WHEN = "decides when, and with what else, a request is computed"
_WHERE = "decides where weights, blocks or processes are"
_SAYS = "concerns what is logged, measured or handed out"
_BEFORE = "acts on a prompt before it is token ids, which are compared"
_BEHIND = "acts on logits, or on text, behind the KV"
_BLOCKS = "decides how many blocks there are and how vLLM finds them"
_MEDIA = "how media get to the model, which are known by what the model reads of them (media_content)"
_DRAFTS = "decides which tokens are proposed; the model's own KV is of those that were accepted"

TABLE = ArgumentTable(
    in_name={
        "the numbers that are computed with": " ".join(
            [
                _in("model_config", "dtype quantization quantization_config disable_sliding_window model_impl"),
                _in("model_config", "model_class_overrides hf_overrides code_revision model_weights runner convert"),
                _in("cache_config", "cache_dtype kv_cache_dtype_skip_layers sliding_window kv_sharing_fast_prefill"),
                _in("cache_config", "swa_bounded_replay mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode"),
                _in("cache_config", "enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm"),
                _in("cache_config", "use_kda_recoverssm"),
                _in("load_config", "load_format model_loader_extra_config ignore_patterns"),
                _in("kernel_config", "moe_backend linear_backend linear_backend_per_quant sparse_indexer_topk_backend"),
                _in("parallel_config", "tensor_parallel_size worker_cls worker_extension_cls"),
                "attention_config mamba_config diffusion_config additional_config",
            ]
        ),
        "how adapters are applied; an adapter itself is in the name of its requests": _in(
            "lora_config",
            "lora_dtype target_modules enable_tower_connector_lora enable_mixed_moe_lora_format "
            "enable_moe_shared_loras",
        ),
        "how the draft is computed, whose KV lies beside the model's": _in(
            "speculative_config",
            "method quantization moe_backend attention_backend kv_cache_dtype max_model_len revision code_revision "
            "index_share_for_mtp_iteration disable_eagle_block_drop use_heterogeneous_vocab parallel_drafting "
            "draft_tensor_parallel_size tensor_parallel_size draft_load_config",
        ),
        "what the model reads of media, and how it embeds them": _in(
            "model_config.multimodal_config",
            "language_model_only media_io_kwargs mm_processor_kwargs mm_device_do_normalize mm_encoder_only "
            "mm_encoder_attn_dtype mm_encoder_fp8_scale_save_margin video_pruning_rate video_pruning_method",
        ),
    },
    files={"scales of the media's encoder": "model_config.multimodal_config.mm_encoder_fp8_scale_path"},
    covered={
        "the weights, by content, and the model's configuration": " ".join(
            [
                _in("model_config", "model revision hf_config hf_text_config hf_config_path config_format seed"),
                _in("model_config", "trust_remote_code max_model_len spec_target_max_model_len"),
                "quant_config",
            ]
        ),
        "the draft, by content": _in(
            "speculative_config",
            "model draft_model_config target_model_config target_parallel_config draft_parallel_config",
        ),
        "the packing of pages": " ".join(
            [
                _in("cache_config", "block_size user_specified_block_size kv_cache_layout mamba_page_size_padded"),
                _in("cache_config", "skip_page_size_padded mamba_block_size is_attention_free"),
                "device_config",
            ]
        ),
    },
    harmless={
        _ROUNDING: " ".join(
            [
                "compilation_config optimization_level performance_mode",
                _in("model_config", "enforce_eager disable_cascade_attn"),
                _in("model_config.multimodal_config", "mm_encoder_tp_mode mm_encoder_attn_backend"),
                _in("kernel_config", "ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune"),
                _in("kernel_config", "enable_cutedsl_warmup enable_jit_warmup"),
                _in("lora_config", "fully_sharded_loras specialize_active_lora"),
                _in(
                    "parallel_config", "is_moe_model enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling"
                ),
                _in("parallel_config", "enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy"),
                _in("parallel_config", "all2all_backend disable_custom_all_reduce enable_dbo ubatch_size"),
                _in("parallel_config", "dbo_decode_token_threshold dbo_prefill_token_threshold"),
                _in("parallel_config", "enable_elastic_ep elastic_ep_max_dp_size"),
            ]
        ),
        _WHEN: "scheduler_config",
        _WHERE: " ".join(
            [
                "offload_config engram_config instance_id shutdown_timeout weight_transfer_config",
                _in("model_config", "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend"),
                _in("model_config", "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator"),
                _in("load_config", "download_dir safetensors_load_strategy safetensors_prefetch_num_threads device"),
                _in("load_config", "safetensors_prefetch_block_size use_tqdm_on_load pt_load_map_location"),
                _in("lora_config", "max_lora_rank max_loras max_cpu_loras max_lora_cls_labels"),
                _in("parallel_config", "data_parallel_size data_parallel_size_local data_parallel_rank"),
                _in("parallel_config", "data_parallel_rank_local data_parallel_master_ip data_parallel_rpc_port"),
                _in("parallel_config", "dp_sync_interval data_parallel_master_port data_parallel_backend"),
                _in("parallel_config", "data_parallel_external_lb data_parallel_hybrid_lb data_parallel_index"),
                _in("parallel_config", "max_parallel_loading_workers enable_shm_tensor_arena ray_runtime_env"),
                _in("parallel_config", "disable_nccl_for_dp_synchronization ray_workers_use_nsight placement_group"),
                _in("parallel_config", "distributed_executor_backend master_addr master_port node_rank nnodes"),
                _in("parallel_config", "numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids"),
                _in("parallel_config", "distributed_timeout_seconds cpu_distributed_timeout_seconds world_size rank"),
                _in("parallel_config", "_data_parallel_master_port_list _coord_store_port _api_process_count"),
                _in("parallel_config", "_api_process_rank enable_fault_tolerance fault_tolerance_config"),
            ]
        ),
        "other sizes than 1 are refused where the geometry is read, or it has to do with these": _in(
            "parallel_config",
            "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend "
            "dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size "
            "_allow_auto_resolve_cp_interleave_size",
        ),
        _SAYS: " ".join(
            [
                "aux_output_config observability_config logging_config profiler_config kv_events_config",
                _in("model_config", "served_model_name hf_token max_logprobs return_sampling_mask enable_trace_replay"),
            ]
        ),
        _BEFORE: _in(
            "model_config",
            "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init renderer_num_workers io_processor_plugin "
            "allowed_local_media_path allowed_media_domains",
        ),
        _BEHIND: " ".join(
            [
                "watermark_config structured_outputs_config reasoning_config",
                _in("model_config", "logprobs_mode use_fp64_gumbel generation_config override_generation_config"),
                _in("model_config", "logits_processors word_embeddings_untied_by_checkpoint"),
            ]
        ),
        "its requests are not cached": _in("model_config", "enable_prompt_embeds pooler_config"),
        "says what is allowed, or what the model is": _in(
            "model_config", "allow_deprecated_quantization is_submodel_config"
        ),
        _BLOCKS: _in(
            "cache_config",
            "prefix_match_unit gpu_memory_utilization num_gpu_blocks_override enable_prefix_caching "
            "prefix_caching_hash_algo prefix_cache_retention_interval num_gpu_blocks num_cpu_blocks "
            "effective_attention_block_size kv_cache_size_tokens kv_cache_max_concurrency hash_block_size "
            "cache_hit_alignment_tokens kv_cache_memory_bytes kv_offloading_size kv_offloading_backend "
            "_block_size_resolved",
        ),
        _MEDIA: " ".join(
            [
                _in("model_config.multimodal_config", "limit_per_prompt enable_mm_embeds mm_processor_cache_gb"),
                _in("model_config.multimodal_config", "mm_processor_cache_type mm_hasher_algorithm mm_tensor_ipc"),
                _in("model_config.multimodal_config", "mm_shm_cache_max_object_size_mb mm_encoder_fp8_scale_save_path"),
                _in("model_config.multimodal_config", "interleave_mm_strings skip_mm_profiling mm_ipc_gpu_memory_gb"),
                _in("model_config.multimodal_config", "allow_missing_mm_embeddings"),
                "ec_transfer_config ec_manager_config",
            ]
        ),
        "the request's adapter is in the name": _in("lora_config", "default_mm_loras"),
        _DRAFTS: _in(
            "speculative_config",
            "enforce_eager num_speculative_tokens disable_padded_drafter_batch use_local_argmax_reduction "
            "prompt_lookup_max prompt_lookup_min num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth "
            "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob "
            "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length "
            "enable_adaptive_verification draft_sample_method dspark_draft_topk",
        ),
        "how this connector is reached and what it does": "kv_transfer_config",
    },
    refused={
        "cache_config.calculate_kv_scales": "every engine would have KV scales of its own; load them with the model",
    },
)

ADAPTER_TABLE = ArgumentTable(
    in_name={"how the experts' weights are read from its files": "is_3d_lora_weight"},
    files={},
    covered={"the adapter, by content": "lora_path", "the request's namespace": "lora_name"},
    harmless={
        "tells adapters of one engine apart": "lora_int_id",
        _SAYS: "base_model_name",
        "has its files read again, whose changes are seen": "load_inplace",
    },
    refused={},
)
"""The fields of a `LoRARequest`."""

NAMED_OTHERWISE = {
    "aggregate_engine_logging": "logging_config",
    "data_parallel_address": "parallel_config.data_parallel_master_ip",
    "data_parallel_multi_port_external_lb": "parallel_config.data_parallel_external_lb",
    "data_parallel_start_rank": "parallel_config.data_parallel_rank",
    "device_ids": "parallel_config.assigned_physical_gpu_ids",
    "disable_log_stats": "observability_config",
    "enable_log_requests": "logging_config",
    "enable_lora": "lora_config.max_loras",
    "enable_mamba_cache_stochastic_rounding": "mamba_config",
    "fail_on_environ_validation": "observability_config",
    "gdn_prefill_backend": "additional_config",
    "kda_decode_backend": "additional_config",
    "kda_prefill_backend": "additional_config",
    "limit_mm_per_prompt": "model_config.multimodal_config.limit_per_prompt",
    "log_config_file": "logging_config",
    "lora_target_modules": "lora_config.target_modules",
    "mamba_backend": "mamba_config",
    "mamba_cache_philox_rounds": "mamba_config",
    "mamba_ssu_algorithm": "mamba_config",
    "mm_processor_device": "model_config.multimodal_config.mm_processor_kwargs",
    "scheduling_policy": "scheduler_config.policy",
    "spec_method": "speculative_config.method",
    "spec_model": "speculative_config.model",
    "spec_tokens": "speculative_config.num_speculative_tokens",
    "tokens_only": "model_config.skip_tokenizer_init",
}
"""Fields of the configuration that have another name as arguments."""


def arguments_of(config: Any, section: str = "") -> Iterator[Argument]:
    """The fields of a configuration of vLLM and of its sections; a section with an entry in the table is one argument.

    Args:
        config: a `VllmConfig`, or a section of one.
        section: its name, with a dot behind it.
    """
    for field in dataclasses.fields(config):
        name = f"{section}{field.name}"
        value = getattr(config, field.name, None)
        if name not in TABLE.names and dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from arguments_of(value, f"{name}.")
        else:
            yield Argument(name, value, _default(field))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    default: Any = field.default
    if hasattr(default, "get_default"):  # of pydantic
        return default.get_default(call_default_factory=True)
    return "<none>" if default is dataclasses.MISSING else default
