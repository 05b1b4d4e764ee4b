"""Sorts every argument of SGLang: into the name of its namespaces, or with a reason why not. Names are of `ServerArgs`
(0.5.23)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prefixd.integrations.engine.naming.arguments import Argument, ArgumentTable

TABLE = ArgumentTable(
    in_name={
        "which weights, and the numbers that are computed with": """
            load_format model_loader_extra_config custom_weight_loader context_length model_impl model_config_parser
            json_model_override_args dtype quantization modelopt_quant quantize_and_serve rl_quant_profile
            kv_cache_dtype enable_tf32_matmul weight_version modelexpress_config enable_multimodal language_only
            enable_deterministic_inference language_model_only encoder_only encoder_urls encoder_register_urls
            forward_hooks
            remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port
            debug_tensor_dump_input_file rl_on_policy_target enable_precise_embedding_interpolation is_embedding
            enable_mis disable_hybrid_swa_memory swa_prefix_tails enable_encoder_swa_bounded_replay
            enable_decoder_swa_bounded_replay prefill_only_disable_kv_cache
            dllm_algorithm dllm_fdfo""",
        "attention, and what it rounds to": """
            attention_backend decode_attention_backend prefill_attention_backend mm_attention_backend
            fp8_gemm_runner_backend fp4_gemm_runner_backend dsa_prefill_backend dsv4_prefill_backend dsa_decode_backend
            dsa_paged_mqa_logits_backend dsa_topk_backend dsv4_attn_backend enable_deepseek_v4_fp4_indexer
            prefill_kv_cache_dequant_dtype qsa_indexer_dtype c128_page_size enable_hisparse hisparse_config""",
        "states": """
            mamba_backend mamba_ssm_dtype enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
            mamba_radix_cache_strategy enable_int8_mamba_checkpoint int8_mamba_ckpt_size linear_attn_backend
            linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend enable_linear_replayssm
            linear_replayssm_cache_len enable_linear_replayssm_spec""",
        "experts, and what goes between them": """
            moe_a2a_backend enable_w4a4_mxfp4_megamoe moe_runner_backend flashinfer_mxfp4_moe_precision
            deepep_dispatcher_output_dtype flashinfer_a2a_dispatch_type enable_quant_communications kt_method
            kt_num_gpu_experts kt_max_deferred_experts_per_token""",
        "the draft, whose KV is stored, too": """
            speculative_algorithm speculative_draft_model_revision speculative_draft_load_format
            speculative_draft_attention_backend speculative_draft_kv_cache_dtype speculative_draft_window_size
            speculative_draft_sink_size speculative_moe_runner_backend speculative_moe_a2a_backend
            speculative_enable_w4a4_mxfp4_megamoe speculative_draft_model_quantization
            speculative_dflash_block_size speculative_dspark_block_size speculative_dsa_topk_backend
            enable_multi_layer_eagle""",
        "what the model reads of media": """
            mm_process_config image_processor_backend disable_fast_image_processor""",
        "how adapters are applied": """
            lora_target_modules experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading""",
        "how pages are laid out, beside what is read of the pools themselves": """
            enable_page_major_kv_layout enable_unified_memory enable_kv_cache_sharding enable_dsa_cache_layer_split
            dcp_replicate_q_proj enable_prefill_cp cp_strategy enable_cp_decode_attn_tp""",
    },
    files={
        "weights, scales and configurations that lie beside the model": """
            quantization_param_path modelopt_checkpoint_restore_path decrypted_config_file
            decrypted_draft_config_file kt_weight_path dllm_algorithm_config""",
        "adapters: SGLang's keys have their names and paths": "lora_paths uno_lora_path",
        "the draft": "speculative_draft_model_path speculative_token_map",
    },
    covered={
        "the weights, by content": "model_path revision trust_remote_code",
        "the pools, and the rank": """
            page_size tp_size pp_size dcp_size attn_cp_size dp_size attn_dp_size enable_dp_attention hicache_mem_layout
            hicache_io_backend device""",
        "the name under which the model is served": "served_model_name",
    },
    harmless={
        "the same numbers but for the order of sums, which also differs between batches of different sizes": """
            bf16_gemm_backend disable_flashinfer_autotune flashinfer_autotune_skip_ops enable_lean_attention
            triton_attention_reduce_in_fp32 triton_attention_num_kv_splits triton_attention_split_tile_size
            flashinfer_mla_disable_ragged enable_fused_qk_norm_rope enable_amd_monokernel dsa_triton_union
            enable_dsa_fused_indexer enable_nvidia_megakernel
            cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
            cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context
            disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding
            enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph enable_torch_compile
            enable_torch_compile_debug_mode torch_compile_max_bs cuda_graph_max_seq_len_prefill
            enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem
            enable_scattered_sconv pre_warm_nccl boundary_reduction enable_flashinfer_allreduce_fusion
            enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
            enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
            disable_aiter_allreduce_fusion_in_decode speculative_boundary_reduction speculative_attention_mode
            enable_fused_moe_sum_all_reduce deepep_v2_mode deepep_mode fuseep_mode ep_num_redundant_experts
            ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations
            eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold deepep_config enable_waterfill
            disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion enforce_shared_experts_fusion
            enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold
            moe_dp_size dwdp_size dcp_comm_backend enable_attn_tp_input_scattered enable_shared_experts_attn_tp
            shared_experts_tp_size enable_dense_mlp_attn_tp enable_layernorm_sp disable_attn_tp_gather ep_size
            moe_dense_tp_size enable_cp_tp_group_sharing enable_megamoe_for_layernorm_sp disable_chunked_prefix_cache
            mm_enable_dp_encoder lora_backend max_lora_chunk_size""",
        "decides when, and with what else, a request is computed": """
            mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size
            prefill_decode_interval prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens
            prefill_max_requests schedule_policy enable_priority_scheduling disable_priority_preemption
            default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first
            priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness
            disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk
            enable_prefill_delayer prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
            prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets
            prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms min_free_slots_delay
            pp_max_micro_batch_size pp_async_batch_depth enable_pdmux pdmux_config_path sm_group_num
            load_balance_method lora_drain_wait_threshold""",
        "decides what SGLang keeps in its own caches, and how it talks to its storage": """
            swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set radix_eviction_policy
            radix_eviction_policy_config _radix_eviction_policy_explicitly_set disable_radix_cache
            enable_session_radix_cache radix_cache_backend enable_hierarchical_cache hicache_host_memory_mode
            hicache_host_memory_fraction hicache_ratio hicache_size hicache_write_policy hicache_storage_backend
            hicache_storage_prefetch_policy hicache_storage_backend_extra_config
            hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
            enable_unified_cache_external_linker unified_cache_external_linker_backend
            unified_cache_external_linker_config enable_linker_mla_dedup enable_lmcache lmcache_config_file
            enable_flexkv flexkv_config_file max_mamba_cache_size mamba_full_memory_ratio mamba_max_states_per_path
            uses_mamba_radix_cache mamba_track_interval""",
        "decides where weights, pages or processes are": """
            base_gpu_id gpu_id_step numa_node use_ray nccl_port dist_timeout dist_init_addr gated_launch_port nnodes
            node_rank enable_p2p_check enable_dp_attention_local_control_broadcast elastic_ep_backend
            enable_elastic_expert_backup mooncake_ib_device ep_join_mode ep_join_rank_offset elastic_ep_initial_size
            max_ep_size elastic_ep_scale_timeout kt_cpuinfer kt_threadpool_count enable_paged_experts
            paged_experts_num_resident cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step
            offload_mode ple_offload_embedding ple_offload_backend ple_offload_dir enable_memory_saver
            enable_weights_cpu_backup enable_draft_weights_cpu_backup startup_weight_load_mode
            weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
            weight_loader_drop_cache_after_load remote_instance_weight_loader_send_weights_group_ports
            remote_instance_weight_loader_backend remote_instance_weight_loader_start_seed_via_transfer_engine
            engine_info_bootstrap_port download_dir model_checksum delete_ckpt_after_loading
            modelopt_checkpoint_save_path modelopt_export_path weight_cache_mode weight_cache_socket
            weight_cache_timeout max_lora_rank enable_lora enable_lora_overlap_loading max_loaded_loras
            max_loras_per_batch lora_eviction_policy disaggregation_mode disaggregation_transfer_backend
            disaggregation_bootstrap_port disaggregation_ib_device disaggregation_decode_enable_radix_cache
            disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup
            num_reserved_decode_tokens disaggregation_decode_extra_slots disaggregation_decode_polling_interval
            disaggregation_enable_kv_checksum disaggregation_decode_host_receive_threshold
            disaggregation_decode_allocation_policy enable_pd_role_switch optimistic_prefill_attempts
            encoder_transfer_backend encoder_bootstrap_port enable_adaptive_dispatch_to_encoder
            decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role""",
        "decides which tokens are proposed; the model's own KV is of those that were accepted": """
            speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens speculative_dspark_sps_table_path
            speculative_dspark_confidence_sts_path speculative_dspark_align_verify_tokens_to_graph_tier
            speculative_accept_threshold_single speculative_accept_threshold_acc speculative_use_rejection_sampling
            speculative_use_block_verification speculative_adaptive speculative_adaptive_config spec_trace_dir
            _speculative_draft_quantization_explicitly_set
            speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth speculative_ngram_match_type
            speculative_ngram_max_trie_depth speculative_ngram_capacity speculative_ngram_external_corpus_path
            speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens
            speculative_domino_candidate_pool_size""",
        "acts on a prompt before it is token ids, which are in SGLang's keys": """
            tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
            skip_tokenizer_init chat_template trust_request_chat_template hf_chat_template_name completion_template
            default_chat_template_kwargs allow_auto_truncate enable_dynamic_batch_tokenizer
            dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
            asr_max_buffer_seconds asr_max_concurrent_sessions enable_streaming_session file_storage_path
            limit_mm_data_per_request allowed_media_domains media_url_max_file_size_mb""",
        "how media get to the model; SGLang's keys have hashes of them": """
            enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_processor_worker_num mm_io_worker_num
            mm_preprocess_cache_size_mb enable_mm_global_cache mm_global_cache_backend mm_feature_transport""",
        "acts on logits, or on text, behind the KV": """
            enable_fp32_lm_head enable_dp_lm_head enable_tp_lm_head_all_to_all sampling_backend grammar_backend
            sampling_defaults preferred_sampling_params reasoning_parser strip_thinking_cache enable_strict_thinking
            tool_call_parser tool_server constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
            constrained_json_max_whitespace_cnt disable_tokenizer_batch_decode enable_custom_logit_processor
            sampling_mask_max_tokens disable_outlines_disk_cache mlx_enable_sampling random_seed enable_watermark
            watermark_config watermark_key watermark_key_b watermark_context_window watermark_mixing_probability
            watermark_max_probability watermark_default_enabled watermark_enforce_all""",
        "concerns what is logged, measured, served or handed out": """
            watchdog_timeout soft_watchdog_timeout sleep_on_idle custom_sigquit_handler gc_threshold host port
            fastapi_root_path smg_grpc_mode grpc_mode grpc_port grpc_worker_threads grpc_response_timeout_secs sidecar
            sidecar_args skip_server_warmup warmups enable_http2 http2_max_concurrent_streams
            http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password
            enable_ssl_refresh api_key admin_api_key enable_cache_report return_input_ids return_output_ids
            stream_interval batch_notify_size stream_response_default_include_usage incremental_streaming_output
            enable_response_store enable_http_worker_reuseport enable_return_hidden_states return_hidden_states_mode
            enable_return_routed_experts enable_return_indexer_topk enable_return_aux_hidden_states
            aux_hidden_state_capture return_aux_hidden_state_layer_ids
            log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
            uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port
            enable_mfu_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval
            tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
            bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
            generation_tokens_buckets gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging
            kv_events_config load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
            forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name
            export_metrics_to_file export_metrics_to_file_dir stat_loggers enable_layerwise_nvtx_marker
            kv_canary kv_canary_real_data kv_canary_sweep_interval debug_tensor_dump_output_folder
            debug_tensor_dump_layers msprobe_dump_config expert_distribution_recorder_mode
            expert_distribution_recorder_buffer_size expert_balancedness_report_mode""",
    },
    refused={
        "trust_mm_content_hashes": "an image would be what a client says that its hash is, in all engines and after "
        "restarts; leave the flag out, or start SGLang without prefixd",
        "checkpoint_engine_wait_weights_before_ready": "the weights come after the start, and nothing tells which they "
        "are; start SGLang with the weights, or without prefixd",
    },
)


def arguments_of(server_args: Any) -> Iterator[Argument]:
    """SGLang's arguments, with the values that it has chosen itself where it did.

    Args:
        server_args: its `ServerArgs`.
    """
    from msgspec import NODEFAULT
    from msgspec.structs import fields
    from sglang.srt.arg_groups.overrides import resolution_result

    for field in fields(type(server_args)):
        default = field.default_factory() if field.default_factory is not NODEFAULT else field.default
        yield Argument(field.name, resolution_result(server_args, field.name), default)
