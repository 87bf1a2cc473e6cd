"""Fields of requests that vLLM, SGLang and OpenAI have and this server does not: refused, or without effect.

A field that would change the answer is refused unless its value has no effect. Hints, and fields that nobody knows, are
accepted and named (http/hints.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from kvanta.params.checks import one_line
from kvanta.server.http.errors import ApiError
from kvanta.server.http.hints import Hint, note


class Refused(NamedTuple):
    """Reason for refusing a field, with the alternative; the values that have no effect, in addition to null."""

    reason: str
    neutral: tuple[Any, ...] = ()


_NOT_RETURNED = Refused("answers do not have it", (False,))
_IDS = "return_token_ids gives the ids of prompt and answer"

REFUSED: Mapping[str, Refused] = {
    "audio": Refused("answers are texts"),
    "audio_data": Refused("models read text alone", ([],)),
    "background": Refused("the answer is sent as soon as it is complete; give stream", (False,)),
    "beam_width": Refused("give n, temperature and seed for several texts", (1,)),
    "chat_template": Refused("the server's own is used (--chat-template); chat_template_kwargs reach it"),
    "custom_logit_processor": Refused("no code of others is run; give logit_bias or structured_outputs"),
    "custom_params": Refused("they are for custom_logit_processor, which is not supported", ({},)),
    "documents": Refused("put them into the messages", ([],)),
    "function_call": Refused("give tool_choice", ("none", "auto")),
    "functions": Refused("give tools", ([],)),
    "image_data": Refused("models read text alone", ([],)),
    "input_embeds": Refused("prompts are texts or token ids"),
    "input_ids": Refused("give them as prompt, or as input_ids, of /v1/completions"),
    "log_metrics": Refused("every request is counted", (True,)),
    "logprob_start_len": Refused("give prompt_logprobs", (-1,)),
    "lora_id": Refused("LoRA adapters are not supported; merge them into the weights", ("", [])),
    "lora_path": Refused("LoRA adapters are not supported; merge them into the weights", ("", [])),
    "lora_request": Refused("LoRA adapters are not supported; merge them into the weights"),
    "max_thinking_tokens": Refused("give thinking_token_budget"),
    "modalities": Refused("answers are texts", (["text"], [])),
    "moderation": Refused("the server has no moderation"),
    "multi_item_delimiter_indices": Refused("a request scores one text"),
    "positional_embed_overrides": Refused("prompts are texts or token ids"),
    "prompt_embeds": Refused("prompts are texts or token ids"),
    "require_reasoning": Refused("chats tell reasoning from the answer", (False,)),
    "return_bytes": _NOT_RETURNED,
    "return_cached_tokens_details": Refused("usage.prompt_tokens_details.cached_tokens is always there", (False,)),
    "return_entropy": _NOT_RETURNED,
    "return_flat_raw_output_top_logprobs": Refused("give logprobs and top_logprobs", (False,)),
    "return_flat_raw_top_logprobs": Refused("give logprobs and top_logprobs", (False,)),
    "return_hidden_states": _NOT_RETURNED,
    "return_indexer_topk": _NOT_RETURNED,
    "return_input_ids_in_sglext": Refused(_IDS, (False,)),
    "return_logprob": Refused("give logprobs", (False,)),
    "return_meta_info": _NOT_RETURNED,
    "return_output_ids_in_sglext": Refused(_IDS, (False,)),
    "return_prompt_text": _NOT_RETURNED,
    "return_prompt_token_ids": Refused(_IDS, (False,)),
    "return_routed_experts": _NOT_RETURNED,
    "return_sampling_mask": _NOT_RETURNED,
    "return_spec_tokens_details": _NOT_RETURNED,
    "return_token_offsets": _NOT_RETURNED,
    "return_weight_versions": _NOT_RETURNED,
    "routed_experts_start_len": Refused("answers do not have the experts", (0,)),
    "sampling_logprobs_mode": Refused("logprobs are the model's, before any bias or mask"),
    "separate_reasoning": Refused("--reasoning-parser separates it for every request, or include_reasoning", (True,)),
    "session_params": Refused("the prefix cache finds what earlier requests have computed", ({},)),
    "stream_reasoning": Refused("reasoning is streamed as it is generated", (True,)),
    "structural_tag": Refused("give structured_outputs, or tools", ("",)),
    "suffix": Refused("/v1/completions has it", ("",)),
    "task": Refused("write it into the messages"),
    "token_ids_logprob": Refused("give logprob_token_ids"),
    "token_indices_to_pool": Refused("answers are texts"),
    "top_logprobs_num": Refused("give logprobs", (0,)),
    "video_data": Refused("models read text alone", ([],)),
    "vllm_xargs": Refused("there are no extensions that read them", ({},)),
    "watermark": Refused("texts are not marked", (False,)),
}

# Fields without effect, by the reason.
_IGNORED_GROUPS: Mapping[str, str] = {
    "it is for the client's own use": (
        "conversation_id custom_labels external_trace_header received_time request_id rid session_id"
    ),
    "it names the user, for a server with `--fair-by user` alone": "metadata safety_identifier user",
    "requests have no pictures, sounds or films": (
        "image_max_dynamic_patch images_config max_dynamic_patch media_io_kwargs min_dynamic_patch mm_content_hashes "
        "mm_hashes mm_payload mm_processor_kwargs need_wait_for_mm_inputs num_items_assigned return_mm_kwargs "
        "use_audio_in_video video_config video_max_dynamic_patch"
    ),
    "there is one server, without parts that pass requests on": (
        "bootstrap_host bootstrap_pair_key bootstrap_port bootstrap_room data_parallel_rank decode_tp_size "
        "disagg_prefill_dp_rank ec_transfer_params encoder_urls http_worker_ipc kv_hints kv_transfer_params "
        "routed_dp_rank routing_key"
    ),
    "it is a hint, and the answer is the same without it": (
        "prediction prompt_cache_key prompt_cache_options prompt_cache_retention service_tier"
    ),
    "logs have no texts of requests": "no_logs",
    "it is the form of another field, which is refused": "return_flat_raw_top_logprobs_b64",
    "answers of JSON have one form of log-probabilities": "flat_logprobs",
}
# Fields that no list of docs/fields.md has: those of OpenRouter, LM Studio, Open WebUI, llama.cpp's page, Groq, xAI,
# Qwen's and Mistral's services, and Codex.
_CLIENTS_GROUPS: Mapping[str, str] = {
    "there is one model on one server": "draft_model models provider route ttl",
    "the server is not the client's page": (
        "background_tasks chat_id client_metadata features filter_ids model_item parent_id tool_ids tool_servers "
        "variables"
    ),
    "the server has no search and no plugins": "enable_search plugins search_parameters search_settings transforms",
    "whole answers have the usage, and streams with stream_options": "usage",
    "the model stays in memory": "keep_alive",
    "the context is the server's (--max-model-len)": "num_ctx",
    "the prefix cache finds what earlier requests have computed, and there are no slots": (
        "cache_prompt id_slot n_cache_reuse slot_id"
    ),
    "reasoning has its own field in answers where the server has --reasoning-parser": "reasoning_format",
    "answers have no such parts": "return_progress timings_per_token",
    "its fields belong to the top level: openai's clients put them there": "extra_body",
    "write it into the messages": "prompt_mode safe_prompt",
}
_EFFORT = "only chats have it, because the chat template reads it"
_STORE = Hint("answers are not kept")
IGNORED: Mapping[str, Hint] = {
    **{name: Hint(reason) for reason, names in _IGNORED_GROUPS.items() for name in names.split()},
    **{name: Hint(reason, "0.2.0") for reason, names in _CLIENTS_GROUPS.items() for name in names.split()},
    "reasoning_effort": Hint(_EFFORT, "0.2.0"),
    "store": _STORE,
    "thinking": Hint("only chats have it, because the chat template reads it", "0.2.0"),
    "verbosity": Hint("write it into the messages", "0.2.0"),
    "web_search_options": Hint("the server has no search", "0.2.0"),
}
_STORED = "answers are not kept; send the earlier items as input"
UNKEPT = "answers are not kept; send the earlier messages"
_GIVE = "the field of this endpoint is "

# Fields of /v1/responses alone; its further fields are those of chats. So are the names of the next two tables.
RESPONSES_REFUSED: Mapping[str, Refused] = {
    "access_programs": Refused("Kvanta has no access programs"),
    "add_generation_prompt": Refused("only chats have it", (True,)),
    "background_options": Refused("the answer is sent as soon as it is complete; give stream", ({},)),
    "continue_final_message": Refused("only chats have it", (False,)),
    "conversation": Refused(_STORED),
    "echo": Refused("only chats have it", (False,)),
    "enable_response_messages": Refused("answers do not have them", (False,)),
    "image": Refused("models read text alone", ({},)),
    "logprobs": Refused("give include: ['message.output_text.logprobs'] and top_logprobs", (False,)),
    "max_completion_tokens": Refused(_GIVE + "max_output_tokens"),
    "max_tokens": Refused(_GIVE + "max_output_tokens"),
    "messages": Refused(_GIVE + "input"),
    "n": Refused("an answer has one text", (1,)),
    "previous_input_messages": Refused(_STORED, ([],)),
    "prompt": Refused("there are no stored prompts; give instructions and input"),
    "prompt_logprobs": Refused("only chats and completions have it"),
    "reasoning_effort": Refused(_GIVE + "reasoning.effort"),
    "response_format": Refused(_GIVE + "text.format"),
    "return_token_ids": Refused("only chats and completions have it", (False,)),
}
_TRUNCATED = Hint("prompts are truncated only by a request's truncate_prompt_tokens", "0.2.0")
RESPONSES_IGNORED: Mapping[str, Hint] = {
    "context_management": _TRUNCATED,
    "max_tool_calls": Hint("the server has no built-in tools"),
    "truncation": _TRUNCATED,
}
# Keys of `reasoning`, and of `stream_options`.
REASONING_IGNORED: Mapping[str, Hint] = {
    "context": Hint("the chat template decides", "0.2.0"),
    **dict.fromkeys(("generate_summary", "summary"), Hint("the reasoning itself is in the answer", "0.2.0")),
    "mode": Hint("there is one mode", "0.2.0"),
}
STREAM_IGNORED: Mapping[str, Hint] = {"include_obfuscation": Hint("events are sent without padding", "0.2.0")}
# Fields of /v1/messages.
MESSAGES_REFUSED: Mapping[str, Refused] = {
    **{
        name: RESPONSES_REFUSED[name]
        for name in ("add_generation_prompt", "continue_final_message", "echo", "prompt_logprobs", "return_token_ids")
    },
    "logprobs": Refused("Anthropic's answers do not have them", (False,)),
    "max_completion_tokens": Refused(_GIVE + "max_tokens"),
    "n": Refused("an answer has one text", (1,)),
    "output_format": Refused(_GIVE + "output_config.format"),
    "parallel_tool_calls": Refused(_GIVE + "tool_choice.disable_parallel_tool_use", (True,)),
    "reasoning_effort": Refused(_GIVE + "output_config.effort"),
    "response_format": Refused(_GIVE + "output_config.format"),
    "stop": Refused(_GIVE + "stop_sequences", ([],)),
    "top_logprobs": Refused("Anthropic's answers do not have them", (0,)),
}
MESSAGES_IGNORED: Mapping[str, Hint] = {
    "cache_control": Hint("the prefix cache finds what earlier requests have computed"),
    **dict.fromkeys(("billing_policy", "fallback_credit_token"), Hint("nothing is billed")),
    **dict.fromkeys(
        ("betas", "diagnostics", "inference_geo", "user_profile_id", "workspace_id"),
        Hint("there is one server and one user"),
    ),
    **dict.fromkeys(("compaction", "context_management"), _TRUNCATED),
    "container": Hint("the server runs no code", "0.2.0"),
    "fallbacks": Hint("there is one model", "0.2.0"),
    "mcp_servers": Hint("the server calls no others", "0.2.0"),
    "speed": Hint("every request has the same", "0.2.0"),
    "stream_options": Hint("streams always have the usage", "0.2.0"),
    "thread": Hint(UNKEPT, "0.2.0"),
}
# Fields of /v1/embeddings, /rerank and /score.
_TEXTS_ALONE = "give texts; /tokenize makes token ids of a conversation, which /v1/embeddings takes as input"
_WHOLE = "texts are never split; give truncate_prompt_tokens"
_LABELS = "scores are similarities; logprob_token_ids of /v1/completions gives probabilities of label tokens"
_HIDDEN = "prompts are tokens"
POOLING_REFUSED: Mapping[str, Refused] = {
    "add_generation_prompt": Refused(_TEXTS_ALONE, (False,)),
    "chat_template": Refused(_TEXTS_ALONE),
    "chat_template_kwargs": Refused(_TEXTS_ALONE, ({},)),
    "continue_final_message": Refused(_TEXTS_ALONE, (False,)),
    "embed_dtype": Refused("embeddings are float32", ("float32",)),
    "embed_override_token_id": Refused(_HIDDEN),
    "embed_overrides": Refused(_HIDDEN),
    "embedding_type": Refused("give encoding_format", ("float",)),
    "embedding_types": Refused("give encoding_format", (["float"],)),
    "endianness": Refused("base64 is little-endian", ("native", "little")),
    "input_type": Refused("write the instruction into the texts"),
    "instruct": Refused("write it into the texts", ("",)),
    "instruction": Refused("write it into the texts", ("",)),
    "late_chunking": Refused("every text is embedded alone", (False,)),
    "max_chunks_per_doc": Refused(_WHOLE),
    "max_tokens_per_doc": Refused(_WHOLE, (0,)),
    "max_tokens_per_query": Refused(_WHOLE, (0,)),
    "messages": Refused(_TEXTS_ALONE),
    "overlap_tokens": Refused(_WHOLE),
    "padding": Refused("prompts are never padded", ("do_not_pad",)),
    "rank_fields": Refused("give each document's text"),
    "return_embeddings": Refused("/v1/embeddings returns them", (False,)),
    "truncate": Refused("give truncate_prompt_tokens and truncation_side", ("NONE",)),
    "truncation": Refused("give truncate_prompt_tokens", (False,)),
}
# Fields of SGLang's /v1/score, which compares probabilities of tokens.
SCORE_REFUSED: Mapping[str, Refused] = {
    **POOLING_REFUSED,
    "apply_softmax": Refused(_LABELS, (False,)),
    "item_embed_overrides": Refused(_HIDDEN),
    "item_first": Refused(_LABELS, (False,)),
    "label_token_ids": Refused(_LABELS),
    "query": Refused(_LABELS),
    "query_embed_overrides": Refused(_HIDDEN),
    "return_pooled_hidden_states": Refused("/v1/embeddings returns them", (False,)),
    "return_token_logprobs": Refused(_LABELS, (False,)),
    "score_extraction_token": Refused(_LABELS),
    "temperature": Refused(_LABELS, (1,)),
}
# Read elsewhere: structured.py, and the fields that mean the same as another one.
READ = frozenset(
    (
        "ebnf",
        "extra_key",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "json_schema",
        "no_stop_trim",
        "regex",
        "structured_outputs",
    )
)


def check_fields(extra: Mapping[str, Any], read: Collection[str] = ()) -> None:
    """Raises ApiError, naming the field, if one requests what is not supported. `extra`: undeclared fields.

    Fields of IGNORED, and those that nobody knows, are hints. `read`: those that the endpoint reads.
    """
    check_refused(extra, REFUSED)
    for name, value in extra.items():
        if value is None or name in REFUSED or name in READ or name in read:
            continue
        hint = IGNORED.get(name)
        note(name, "the field is unknown" if hint is None else hint.reason)


def check_refused(given: Mapping[str, Any], table: Mapping[str, Refused], prefix: str = "") -> None:
    """Raises ApiError for a field of the table. `prefix`: of the fields' names."""
    for name, value in given.items():
        refused = table.get(name)
        if refused is None or value is None:
            continue
        if not any(type(value) is type(each) and value == each for each in refused.neutral):
            message = f"{prefix}{name} is not supported, got {one_line(value)}: {refused.reason}"
            raise ApiError(400, message, param=prefix + name)
