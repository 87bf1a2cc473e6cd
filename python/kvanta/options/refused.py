"""Options of other engines that are refused, and the short flags of all."""

from __future__ import annotations

from collections.abc import Mapping

from kvanta.options.ignored import Group

# Refused: they would change answers, or how clients reach the server.
REFUSED_GROUPS: tuple[Group, ...] = (
    Group(
        "ranks are processes of this engine (local, mp, uni); --nnodes puts them on several machines, and "
        "--replicas N runs whole engines with Ray",
        "",
        "distributed_executor_backend",
        ("local", "mp", "uni"),
    ),
    Group(
        "--kv-cache-dtype has the format of the cache: 4 bits are int4, 8 bits int8, FP8 is fp8",
        "",
        "cache_mode kv_bits quant_policy",
    ),
    Group(
        "LoRA adapters are not supported; merge them into the weights",
        "enable_lora enable_moe_shared_loras enable_tower_connector_lora",
        "default_mm_loras lora_modules lora_paths uno_lora_path",
    ),
    Group(
        "edit the model's config.json",
        "",
        "decrypted_config_file hf_config_path hf_overrides json_model_override_args model_class_overrides",
    ),
    Group(
        "only models that generate text are supported",
        "dllm_fdfo enable_mis encoder_only mm_encoder_only",
        "diffusion_config dllm_algorithm dllm_algorithm_config",
    ),
    Group(
        "models generate text and have embeddings, and no classification heads",
        "",
        "convert runner",
        ("auto", "draft", "embed", "generate", "pooling"),
    ),
    Group(
        "requests are texts or token ids, without pictures or sound",
        "enable_mm_embeds enable_multimodal enable_precise_embedding_interpolation enable_prompt_embeds "
        "trust_request_mm_kwargs",
        "",
    ),
    Group(
        "no code of others is run",
        "enable_custom_logit_processor",
        "custom_weight_loader forward_hooks io_processor_plugin logits_processors middleware "
        "reasoning_parser_plugin scheduler_cls sidecar sidecar_args tool_parser_plugin "
        "worker_extension_cls",
        ("[]",),
    ),
    Group("no code of others is run", "", "worker_cls", ("auto",)),
    Group(
        "weights are stored as --weight-dtype says, the cache as --kv-cache-dtype",
        "quantize_and_serve",
        "kt_method kt_weight_path modelopt_checkpoint_restore_path modelopt_checkpoint_save_path "
        "modelopt_export_path modelopt_quant quantization quantization_config rl_quant_profile "
        "speculative_draft_model_quantization",
    ),
    Group(
        "the model's own windows are always used",
        "disable_sliding_window",
        "",
    ),
    Group(
        "the tokenizer is always loaded; token ids are accepted as prompts as well",
        "skip_tokenizer_init tokens_only",
        "",
    ),
    Group(
        "the tokenizer is made of the model's own files by the package tokenizers",
        "",
        "tokenizer_backend",
        ("auto", "huggingface", "hf"),
    ),
    Group(
        "config.json in Hugging Face layout is read",
        "",
        "config_format model_config_parser model_impl",
        ("auto", "hf", "vllm", "transformers"),
    ),
    Group(
        "states of layers are float32, and rounded as state_cache_dtype says (int8) at every state_grid tokens",
        "enable_int8_mamba_checkpoint enable_mamba_cache_stochastic_rounding",
        "mamba_cache_dtype",
        ("auto", "float32"),
    ),
    Group(
        "files are read unchanged",
        "",
        "model_checksum model_loader_extra_config",
        ("{}",),
    ),
    Group(
        "logprobs are the model's, before any bias or mask",
        "",
        "logprobs_mode",
        ("raw_logprobs",),
    ),
    Group(
        "answers have texts, token ids and logprobs",
        "enable_return_aux_hidden_states enable_return_hidden_states enable_return_indexer_topk "
        "enable_return_routed_experts return_sampling_mask",
        "aux_output_config return_aux_hidden_state_layer_ids return_hidden_states_mode sampling_mask_max_tokens",
    ),
    Group(
        "texts are not marked",
        "enable_watermark",
        "watermark watermark_config",
    ),
    Group(
        "set it per request: return_token_ids, return_tokens_as_token_ids",
        "return_input_ids return_output_ids return_tokens_as_token_ids",
        "",
    ),
    Group(
        "set it per request: stream_options",
        "enable_force_include_usage stream_response_default_include_usage",
        "",
    ),
    Group(
        "give --generation-config and --override-generation-config",
        "",
        "preferred_sampling_params sampling_defaults",
        ("model",),
    ),
    Group(
        "give --chat-template FILE",
        "",
        "completion_template hf_chat_template_name",
    ),
    Group(
        "contents reach the template as one text",
        "",
        "chat_template_content_format",
        ("auto", "string"),
    ),
    Group(
        "the server's template is used for every request",
        "trust_request_chat_template",
        "",
    ),
    Group(
        "answers have the role assistant",
        "",
        "response_role",
        ("assistant",),
    ),
    Group(
        "give chat_template_kwargs, or reasoning_effort as the template reads it",
        "enable_strict_thinking",
        "reasoning_config reasoning_effort_map",
    ),
    Group(
        "tool_choice required or a function's name constrains calls",
        "",
        "tool_strict_level",
        ("auto",),
    ),
    Group(
        "the server calls no tools itself",
        "",
        "tool_server",
    ),
    Group(
        "prompts are truncated only by a request's truncate_prompt_tokens",
        "allow_auto_truncate",
        "",
    ),
    Group(
        "samples depend on seed, prompt and parameters alone, by this engine's own random numbers",
        "",
        "rl_on_policy_target",
        ("none",),
    ),
    Group(
        "smaller priority always runs first",
        "abort_on_priority_when_disabled enable_priority_scheduling",
        "default_priority_value",
    ),
    Group(
        "there is one kind of key, --api-key",
        "",
        "admin_api_key",
    ),
    Group(
        "give --ssl-keyfile and --ssl-certfile, and a proxy for more",
        "enable_ssl_refresh",
        "ssl_ca_certs ssl_cert_reqs ssl_ciphers ssl_keyfile_password",
    ),
    Group(
        "the server speaks HTTP/1.1 on --host and --port, or on --uds",
        "enable_http2 grpc grpc_mode headless smg_grpc_mode",
        "gated_launch_port grpc_http_sidecar_port grpc_port smg_http_sidecar_port",
    ),
    Group(
        "caches of other processes are not read or written",
        "",
        "decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank "
        "decoupled_spec_role ec_transfer_config encoder_register_urls encoder_urls "
        "kv_transfer_config",
        ("null",),
    ),
    Group(
        "weights are loaded once, at the start",
        "checkpoint_engine_wait_weights_before_ready remote_instance_weight_loader_start_seed_via_transfer_engine",
        "weight_transfer_config",
    ),
    Group(
        "kvanta serve separates reasoning from answers; LLM returns texts that include it",
        "",
        "reasoning_parser",
    ),
    Group(
        "give --constrained-json-whitespace-pattern",
        "",
        "constrained_json_max_whitespace_cnt",
    ),
    Group(
        "prompts, answers and parameters are never logged",
        "enable_log_outputs",
        "log_requests_level",
        ("0",),
    ),
    Group(
        "the log is written to stderr, one line of text per request",
        "",
        "log_config_file log_requests_format log_requests_target logging_config",
        ("text",),
    ),
    Group(
        "no traces are sent; /metrics and the log have times",
        "enable_trace",
        "collect_detailed_traces otlp_traces_endpoint",
    ),
    Group(
        "metrics are those of docs/serve.md, with their labels and buckets",
        "cudagraph_metrics enable_forward_pass_metrics enable_mfu_metrics export_metrics_to_file kv_cache_metrics",
        "bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token "
        "custom_histogram_buckets export_metrics_to_file_dir extra_metric_labels generation_tokens_buckets "
        "load_publish_endpoint prompt_tokens_buckets tokenizer_metrics_allowed_custom_labels",
        ("default",),
    ),
    Group(
        "nothing is dumped or profiled by a server; kvanta bench has profiles",
        "",
        "crash_dump_folder debug_tensor_dump_output_folder msprobe_dump_config profiler_config",
    ),
    Group(
        "answers have texts, usage and logprobs, and no such field",
        "enable_per_request_metrics",
        "fingerprint_mode fingerprint_value per_request_spec_decode_metrics weight_version",
        ("default",),
    ),
    Group(
        "there is no such endpoint; docs/serve.md has a list",
        "enable_memory_saver enable_offline_docs enable_scale_out enable_sleep_mode enable_streaming_session "
        "enable_trace_replay",
        "",
    ),
    Group(
        "comments that keep a stream alive are not sent; give a proxy a longer timeout",
        "",
        "sse_keep_alive_interval",
        ("0",),
    ),
    Group(
        "give --max-queued-requests",
        "",
        "max_num_queued_tokens",
    ),
)
# Names of values above that take several.
REFUSED_LISTS_OF_VALUES = (
    "bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token collect_detailed_traces "
    "custom_weight_loader encoder_register_urls encoder_urls generation_tokens_buckets log_requests_target "
    "logits_processors lora_modules middleware model_checksum prompt_tokens_buckets "
    "return_aux_hidden_state_layer_ids tokenizer_metrics_allowed_custom_labels"
)
# Short flags of ignored and refused options.
SHORT_FLAGS: Mapping[str, str] = {
    "api_server_count": "-asc",
    "attention_config": "-ac",
    "compilation_config": "-cc",
    "data_parallel_address": "-dpa",
    "data_parallel_backend": "-dpb",
    "data_parallel_external_lb": "-dpe",
    "data_parallel_hybrid_lb": "-dph",
    "data_parallel_multi_port_external_lb": "-dpm",
    "data_parallel_rank": "-dpn",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_size": "-dp",
    "data_parallel_size_local": "-dpl",
    "data_parallel_start_rank": "-dpr",
    "diffusion_config": "-dc",
    "gpu_memory_utilization": "-gmu",
    "prefill_context_parallel_size": "-pcp",
    "quantization": "-q",
}
