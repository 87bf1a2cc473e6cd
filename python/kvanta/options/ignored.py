"""Options of other engines that are accepted without effect. See tools/flag_table.py."""

from __future__ import annotations

from typing import NamedTuple


class Group(NamedTuple):
    """Options of one meaning."""

    reason: str
    """Why they have no effect, or are refused; for the latter with what exists instead."""
    switches: str
    """Names of those without a value, separated by spaces."""
    values: str
    """Names of those with a value."""
    neutral: tuple[str, ...] = ()
    """Values of refused options that have no effect, in addition to none, null, false and empty ones."""


# Accepted: they change nothing in the answers of this engine.
IGNORED_GROUPS: tuple[Group, ...] = (
    Group(
        "ranks divide tensors or layers (docs/parallel.md), and there is no other division of an engine",
        "data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb dcp_q_replicate "
        "dcp_replicate_q_proj disable_aiter_allreduce_fusion_in_decode "
        "disable_aiter_allreduce_fusion_in_prefill disable_attn_tp_gather disable_custom_all_reduce "
        "disable_nccl_for_dp_synchronization disaggregation_decode_enable_offload_kvcache "
        "disaggregation_decode_enable_radix_cache disaggregation_enable_kv_checksum "
        "enable_adaptive_dispatch_to_encoder enable_aiter_allreduce_fusion enable_attn_tp_input_scattered "
        "enable_batch_sharded_sampling enable_cp_decode_attn_tp enable_dense_mlp_attn_tp enable_dp_attention "
        "enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_dsa_cache_layer_split "
        "enable_elastic_ep enable_elastic_expert_backup enable_ep_weight_filter enable_eplb "
        "enable_fault_tolerance enable_flashinfer_allreduce_fusion "
        "enable_fused_moe_sum_all_reduce enable_hc_sp enable_kv_cache_sharding enable_layernorm_sp "
        "enable_linker_mla_dedup enable_megamoe_for_layernorm_sp enable_mscclpp enable_nccl_comm_suspend "
        "enable_nccl_nvls enable_p2p_check enable_pd_role_switch enable_pdmux enable_prefill_cp "
        "enable_quant_communications enable_scattered_sconv enable_shared_experts_attn_tp enable_symm_mem "
        "enable_torch_symm_mem enable_tp_lm_head_all_to_all enable_waterfill "
        "enforce_disable_flashinfer_allreduce_fusion fail_on_environ_validation numa_bind pre_warm_nccl "
        "ray_workers_use_nsight use_ray",
        "all2all_backend api_server_count attention_context_parallel_size attention_data_parallel_size "
        "attn_cp_size attn_dp_size base_gpu_id boundary_reduction cp_kv_cache_interleave_size cp_strategy "
        "cpu_distributed_timeout_seconds data_parallel_address data_parallel_backend data_parallel_rank "
        "data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank "
        "data_parallel_supervisor_port dcp_comm_backend dcp_kv_cache_interleave_size "
        "deepep_config deepep_dispatcher_output_dtype deepep_mode deepep_v2_mode "
        "device_ids disaggregation_bootstrap_port disaggregation_decode_allocation_policy "
        "disaggregation_decode_extra_slots disaggregation_decode_host_receive_threshold "
        "disaggregation_decode_polling_interval disaggregation_decode_retraction_backup "
        "disaggregation_ib_device disaggregation_transfer_backend "
        "dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s "
        "dp_sync_interval dwdp_size elastic_ep_backend elastic_ep_initial_size elastic_ep_join_mode "
        "elastic_ep_join_rank_offset elastic_ep_max_dp_size elastic_ep_scale_timeout encoder_bootstrap_port "
        "encoder_transfer_backend engine_info_bootstrap_port ep ep_dispatch_algorithm ep_num_redundant_experts "
        "ep_size eplb_algorithm eplb_config eplb_min_rebalancing_utilization_threshold "
        "eplb_rebalance_layers_per_chunk eplb_rebalance_num_iterations expert_balancedness_report_mode "
        "expert_distribution_recorder_buffer_size expert_distribution_recorder_mode expert_parallel_size "
        "expert_placement_strategy fault_tolerance_config flashinfer_a2a_dispatch_type "
        "flashinfer_allreduce_fusion_backend fuseep_mode gpu_id_step init_expert_location load_balance_method "
        "load_snapshot_publish_interval max_ep_size max_parallel_loading_workers "
        "moe_a2a_backend moe_data_parallel_size moe_dense_tp_size moe_dp_size mooncake_ib_device nccl_init_addr "
        "nccl_port num_reserved_decode_tokens numa_bind_cpus numa_bind_nodes numa_node "
        "optimistic_prefill_attempts pdmux_config_path pp_async_batch_depth "
        "pp_max_micro_batch_size prefill_context_parallel_size shared_experts_tp_size",
    ),
    Group(
        "one engine runs; --replicas with the same number runs as many, each with the whole model",
        "",
        "data_parallel_size dp dp_size",
    ),
    Group(
        "every model has embeddings, and generates text",
        "is_embedding",
        "",
    ),
    Group(
        "drafts come from n-grams or a draft model (--speculative-config), and answers are the same without",
        "enable_draft_weights_cpu_backup enable_linear_replayssm_spec enable_multi_layer_eagle "
        "speculative_adaptive speculative_dspark_align_verify_tokens_to_graph_tier "
        "speculative_enable_w4a4_mxfp4_megamoe speculative_use_block_verification "
        "speculative_use_rejection_sampling",
        "decrypted_draft_config_file spec_trace_dir "
        "speculative_accept_threshold_acc speculative_accept_threshold_single speculative_adaptive_config "
        "speculative_attention_mode speculative_dflash_block_size "
        "speculative_domino_candidate_pool_size speculative_draft_attention_backend "
        "speculative_draft_load_format "
        "speculative_draft_model_revision speculative_draft_sink_size "
        "speculative_draft_window_size speculative_dsa_topk_backend speculative_dspark_block_size "
        "speculative_dspark_confidence_sts_path speculative_dspark_sps_table_path speculative_eagle_topk "
        "speculative_moe_a2a_backend speculative_moe_runner_backend speculative_ngram_capacity "
        "speculative_ngram_external_corpus_max_tokens speculative_ngram_external_corpus_path "
        "speculative_ngram_external_sam_budget speculative_ngram_match_type speculative_ngram_max_bfs_breadth "
        "speculative_ngram_max_trie_depth speculative_ngram_min_bfs_breadth "
        "speculative_num_steps speculative_token_map",
    ),
    Group(
        "there are no adapters to hold",
        "enable_lora_overlap_loading enable_mixed_moe_lora_format experts_shared_outer_loras "
        "fully_sharded_loras lora_strict_loading lora_use_virtual_experts specialize_active_lora",
        "lora_backend lora_drain_wait_threshold lora_dtype lora_eviction_policy lora_target_modules "
        "max_cpu_loras max_loaded_loras max_lora_chunk_size max_lora_cls_labels max_lora_rank max_loras "
        "max_loras_per_batch",
    ),
    Group(
        "requests have no pictures or sound",
        "disable_chunked_mm_input disable_fast_image_processor enable_broadcast_mm_inputs_process "
        "enable_flash_late_interaction enable_mm_global_cache enable_prefix_mm_cache interleave_mm_strings "
        "language_model_only language_only mm_device_do_normalize mm_enable_dp_encoder skip_mm_profiling "
        "trust_mm_content_hashes",
        "allowed_local_media_path allowed_media_domains asr_max_buffer_seconds asr_max_concurrent_sessions "
        "image_processor_backend limit_mm_data_per_request limit_mm_per_prompt media_io_kwargs "
        "media_url_max_file_size_mb mm_attention_backend mm_encoder_attn_backend mm_encoder_attn_dtype "
        "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path "
        "mm_encoder_tp_mode mm_feature_transport mm_global_cache_backend mm_hasher_algorithm mm_io_worker_num "
        "mm_ipc_gpu_memory_gb mm_preprocess_cache_size_mb mm_process_config mm_processor_cache_gb "
        "mm_processor_cache_type mm_processor_device mm_processor_kwargs mm_processor_worker_num "
        "mm_shm_cache_max_object_size_mb mm_tensor_ipc video_pruning_method video_pruning_rate",
    ),
    Group(
        "kernels and their order of work are this engine's own",
        "async_scheduling disable_cascade_attn disable_cuda_graph_padding disable_decode_cuda_graph "
        "disable_flashinfer_autotune disable_flashinfer_cutlass_moe_fp4_allgather "
        "disable_hybrid_kv_cache_manager disable_hybrid_swa_memory disable_overlap_schedule "
        "disable_prefill_cuda_graph disable_shared_experts_fusion enable_amd_monokernel "
        "enable_bf16x3_router_gemm enable_chunked_prefill enable_cudagraph_gc enable_cumem_allocator enable_dbo "
        "enable_decoder_swa_bounded_replay enable_deepseek_v4_fp4_indexer enable_dsa_fused_indexer "
        "enable_dynamic_batch_tokenizer enable_encoder_swa_bounded_replay "
        "enable_flashinfer_autotune enable_fused_qk_norm_rope enable_hisparse enable_lean_attention "
        "enable_linear_replayssm enable_mamba_shared_prefix_checkpoint enable_mixed_chunk "
        "enable_nvidia_megakernel enable_shm_tensor_arena enable_single_batch_overlap enable_tf32_matmul "
        "enable_torch_compile enable_two_batch_overlap enable_w4a4_mxfp4_megamoe enforce_shared_experts_fusion "
        "flashinfer_mla_disable_ragged jit_monitor_verbose mlx_enable_sampling monokernel swa_bounded_replay "
        "use_fp64_gumbel use_replayssm",
        "additional_config attention_backend attention_config bf16_gemm_backend c128_page_size "
        "compilation_config context_bucket cuda_graph_backend_decode cuda_graph_backend_prefill "
        "cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_config cuda_graph_max_bs "
        "cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill "
        "cuda_graph_prefill_max_context cudagraph_capture_sizes dbo_decode_token_threshold "
        "dbo_prefill_token_threshold decode_attention_backend dsa_decode_backend dsa_paged_mqa_logits_backend "
        "dsa_prefill_backend dsa_topk_backend dsa_triton_union dsv4_attn_backend dsv4_prefill_backend "
        "engram_config flashinfer_autotune_skip_ops flashinfer_mxfp4_moe_precision fp4_gemm_backend "
        "fp8_gemm_backend gdn_prefill_backend hierarchical_sparse_attention_extra_config hisparse_config "
        "int8_mamba_ckpt_size ir_op_priority jit_monitor_mode kda_decode_backend kda_prefill_backend "
        "kernel_config linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend "
        "linear_attn_verify_backend linear_backend linear_replayssm_cache_len mamba_backend mamba_block_size "
        "mamba_cache_mode mamba_cache_philox_rounds mamba_full_memory_ratio mamba_max_states_per_path "
        "mamba_ssu_algorithm mamba_track_interval max_cudagraph_capture_size max_mamba_cache_size moe_backend "
        "moe_runner_backend monokernel_backend num_continuous_decode_steps optimization_level performance_mode "
        "prefill_attention_backend qsa_indexer_dtype replayssm_buffer_len sampling_backend sm_group_num "
        "sparse_indexer_topk_backend swa_full_tokens_ratio swa_prefix_tails tbo_token_distribution_threshold "
        "torch_compile_max_bs triton_attention_num_kv_splits triton_attention_split_tile_size ubatch_size",
    ),
    Group(
        "memory is that of --kv-cache-memory-bytes, and the cache and the weights stay in it",
        "disable_chunked_prefix_cache disable_outlines_disk_cache enable_flexkv enable_lmcache "
        "enable_page_major_kv_layout enable_paged_experts enable_session_radix_cache "
        "enable_unified_cache_external_linker enable_unified_memory enable_weights_cpu_backup "
        "kv_sharing_fast_prefill ple_offload_embedding prefill_only_disable_kv_cache "
        "sleep_mode_offload_cudagraph sleep_on_idle strip_thinking_cache use_tqdm_on_load",
        "cpu_offload_gb cpu_offload_params device_memory_utilization ec_manager_config "
        "flexkv_config_file gpu_memory_utilization hicache_storage_backend "
        "hicache_storage_backend_extra_config hicache_storage_prefetch_policy "
        "hicache_storage_prefetch_retry_max_attempts hicache_storage_prefetch_retry_poll_interval "
        "kt_cpuinfer kt_max_deferred_experts_per_token kt_num_gpu_experts kt_threadpool_count kv_canary "
        "kv_canary_real_data kv_canary_sweep_interval lmcache_config_file mamba_radix_cache_strategy "
        "mem_fraction_static offload_backend offload_group_size offload_mode offload_num_in_group "
        "offload_params offload_prefetch_step paged_experts_num_resident ple_offload_backend "
        "ple_offload_dir prefill_kv_cache_dequant_dtype prefix_cache_retention_interval "
        "prefix_caching_hash_algo prefix_match_unit radix_cache_backend radix_eviction_policy "
        "radix_eviction_policy_config sleep_mode_backend sleep_preserve_parameter_names "
        "unified_cache_external_linker_backend unified_cache_external_linker_config weight_cache_mode "
        "weight_cache_socket weight_cache_timeout",
    ),
    Group(
        "--kv-offload-bytes keeps a GPU's pages in RAM; on a CPU the cache is in RAM",
        "enable_hicache enable_hierarchical_cache",
        "hicache_host_memory_fraction hicache_host_memory_mode hicache_io_backend hicache_mem_layout "
        "hicache_ratio hicache_size hicache_write_policy kv_offloading_backend kv_offloading_size "
        "swap_space",
    ),
    Group(
        "files are mapped and read unchanged, and no code of a model is run",
        "allow_deprecated_quantization delete_ckpt_after_loading trust_remote_code weight_loader_disable_mmap "
        "weight_loader_drop_cache_after_load weight_loader_prefetch_checkpoints",
        "code_revision ignore_patterns modelexpress_config pt_load_map_location "
        "remote_instance_weight_loader_backend remote_instance_weight_loader_seed_instance_ip "
        "remote_instance_weight_loader_seed_instance_service_port "
        "remote_instance_weight_loader_send_weights_group_ports safetensors_load_strategy "
        "safetensors_prefetch_block_size safetensors_prefetch_num_threads startup_weight_load_mode "
        "weight_loader_prefetch_num_threads",
    ),
    Group(
        "the scheduler is this engine's own, and results do not depend on it",
        "disable_frontend_multiprocessing disable_priority_preemption disable_tokenizer_batch_decode "
        "enable_prefill_delayer enable_tokenizer_batch_encode long_prefill_token_threshold_adaptive "
        "scheduler_reserve_full_isl skip_server_warmup",
        "detokenizer_worker_num dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout "
        "gc_threshold max_num_active_seqs max_num_scheduled_tokens "
        "max_prefill_tokens min_free_slots_delay prefill_decode_interval prefill_decode_interval_min_bs "
        "prefill_delayer_max_delay_ms prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio "
        "prefill_delayer_token_usage_low_watermark prefill_max_requests prefill_schedule_interval "
        "priority_scheduling_preemption_threshold renderer_num_workers retraction_policy "
        "schedule_conservativeness scheduler_recv_interval "
        "tokenizer_worker_num warmups",
    ),
    Group(
        "they are about records and profiles that are not made",
        "aggregate_engine_logging debug_cuda_graph disable_log_requests enable_layerwise_nvtx_marker "
        "enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_metrics_for_all_schedulers "
        "enable_profile_cuda_graph enable_torch_compile_debug_mode show_time_cost",
        "debug_tensor_dump_input_file debug_tensor_dump_layers forward_pass_metrics_ipc_name "
        "forward_pass_metrics_worker_id gc_warning_threshold_secs kv_cache_metrics_sample log_level "
        "max_logprobs otlp_service_name prefill_delayer_forward_passes_buckets "
        "prefill_delayer_wait_seconds_buckets show_hidden_metrics_for_version "
        "tokenizer_metrics_custom_labels_header trace_modules",
    ),
    Group(
        "there is no such endpoint, or no such limit, here",
        "cohere_is_reasoning_model enable_http_worker_reuseport enable_reasoning enable_response_store "
        "launch_kobold_api",
        "anthropic_disabled_thinking_effort cohere_format file_storage_path grpc_response_timeout_secs "
        "http2_initial_connection_window_size http2_max_concurrent_streams",
    ),
    Group(
        "names are the server's",
        "",
        "served_model_name",
    ),
    Group(
        "smaller priority always runs first",
        "schedule_low_priority_values_first",
        "",
    ),
    Group(
        "it is always so here",
        "enable_cache_report enable_deterministic_inference enable_dynamic_chunking enable_fp32_lm_head enable_metrics "
        "enable_prompt_tokens_details enable_request_id_headers enable_server_load_tracking "
        "enable_tokenizer_info_endpoint exclude_tools_when_tool_choice_none incremental_streaming_output "
        "triton_attention_reduce_in_fp32",
        "",
    ),
    Group(
        "tokens are sent as soon as their step ends",
        "",
        "batch_notify_size stream_interval",
    ),
    Group(
        "the log has one line per request, with its time and numbers of tokens, and internal errors with their "
        "stack; no prompts, no answers",
        "disable_log_stats enable_log_deltas enable_log_requests enable_request_time_stats_logging log_error_stack",
        "decode_log_interval max_log_len",
    ),
    Group(
        "nothing ends the server but a signal; --request-timeout ends requests",
        "",
        "soft_watchdog_timeout watchdog_config watchdog_timeout",
    ),
    Group(
        "headers are limited to 64 KiB",
        "",
        "h11_max_incomplete_event_size",
    ),
)
# Names of values above that take several.
LISTS_OF_VALUES = (
    "allowed_media_domains cpu_offload_params cuda_graph_bs_decode cuda_graph_bs_prefill cudagraph_capture_sizes "
    "debug_tensor_dump_layers flashinfer_autotune_skip_ops gc_threshold lora_target_modules numa_bind_cpus "
    "numa_bind_nodes numa_node offload_params prefill_delayer_forward_passes_buckets "
    "prefill_delayer_wait_seconds_buckets sleep_preserve_parameter_names"
)
