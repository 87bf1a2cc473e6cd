"""Fields of requests that vLLM, SGLang and OpenAI have and this server does not: refused, or without effect.

A field that would change the answer is refused unless its value has no effect. Other fields that nobody knows are
ignored, as by vLLM, with one line in the log for each name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvanta.params.checks import one_line
from kvanta.server.http.errors import ApiError

_log = logging.getLogger("kvanta.server")


class Refused(NamedTuple):
    """Reason for refusing a field, with the alternative; the values that have no effect, in addition to null."""

    reason: str
    neutral: tuple[Any, ...] = ()


_NOT_RETURNED = Refused("answers do not have it", (False,))
_IDS = "return_token_ids gives the ids of prompt and answer"
_EFFORT = "only chats have it, because the chat template reads it"

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
    "reasoning_effort": Refused(_EFFORT),
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
    "suffix": Refused("models are not asked to fill in the middle", ("",)),
    "task": Refused("write it into the messages"),
    "thinking": Refused("give chat_template_kwargs, such as {'enable_thinking': false}"),
    "token_ids_logprob": Refused("give logprob_token_ids"),
    "token_indices_to_pool": Refused("answers are texts"),
    "top_logprobs_num": Refused("give logprobs", (0,)),
    "verbosity": Refused("write it into the messages", ("medium",)),
    "video_data": Refused("models read text alone", ([],)),
    "vllm_xargs": Refused("there are no extensions that read them", ({},)),
    "watermark": Refused("texts are not marked", (False,)),
    "web_search_options": Refused("the server has no search"),
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
    "answers are not kept": "store",
    "logs have no texts of requests": "no_logs",
    "it is the form of another field, which is refused": "return_flat_raw_top_logprobs_b64",
    "answers of JSON have one form of log-probabilities": "flat_logprobs",
}
IGNORED: Mapping[str, str] = {name: reason for reason, names in _IGNORED_GROUPS.items() for name in names.split()}
_STORED = "answers are not kept; send the earlier items as input"
_UNKEPT = "answers are not kept; send the earlier messages"
_GIVE = "the field of this endpoint is "

# Fields of /v1/responses alone; its further fields are those of chats. So are the names of the next two tables.
RESPONSES_REFUSED: Mapping[str, Refused] = {
    "access_programs": Refused("Kvanta has no access programs"),
    "add_generation_prompt": Refused("only chats have it", (True,)),
    "background_options": Refused("the answer is sent as soon as it is complete; give stream", ({},)),
    "context_management": Refused("prompts are truncated only by a request's truncate_prompt_tokens", ([],)),
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
    "previous_response_id": Refused(_STORED),
    "prompt": Refused("there are no stored prompts; give instructions and input"),
    "prompt_logprobs": Refused("only chats and completions have it"),
    "reasoning_effort": Refused(_GIVE + "reasoning.effort"),
    "response_format": Refused(_GIVE + "text.format"),
    "return_token_ids": Refused("only chats and completions have it", (False,)),
    "store": Refused(_STORED, (False,)),
    "truncation": Refused("prompts are truncated only by a request's truncate_prompt_tokens", ("disabled",)),
}
RESPONSES_IGNORED: Mapping[str, str] = {"max_tool_calls": "the server has no built-in tools"}
# Fields of /v1/messages.
MESSAGES_REFUSED: Mapping[str, Refused] = {
    **{
        name: RESPONSES_REFUSED[name]
        for name in ("add_generation_prompt", "continue_final_message", "echo", "prompt_logprobs", "return_token_ids")
    },
    "compaction": Refused("conversations are not summarized"),
    "container": Refused("the server runs no code"),
    "context_management": Refused("prompts are truncated only by a request's truncate_prompt_tokens", ({},)),
    "fallbacks": Refused("there is one model", ("default", [])),
    "logprobs": Refused("Anthropic's answers do not have them", (False,)),
    "max_completion_tokens": Refused(_GIVE + "max_tokens"),
    "mcp_servers": Refused("the server calls no others", ([],)),
    "n": Refused("an answer has one text", (1,)),
    "output_format": Refused(_GIVE + "output_config.format"),
    "parallel_tool_calls": Refused(_GIVE + "tool_choice.disable_parallel_tool_use", (True,)),
    "reasoning_effort": Refused(_GIVE + "output_config.effort"),
    "response_format": Refused(_GIVE + "output_config.format"),
    "speed": Refused("every request has the same", ("standard",)),
    "stop": Refused(_GIVE + "stop_sequences", ([],)),
    "stream_options": Refused("streams always have the usage", ({},)),
    "thread": Refused(_UNKEPT),
    "top_logprobs": Refused("Anthropic's answers do not have them", (0,)),
}
MESSAGES_IGNORED: Mapping[str, str] = {
    "cache_control": "the prefix cache finds what earlier requests have computed",
    **dict.fromkeys(("billing_policy", "fallback_credit_token"), "nothing is billed"),
    **dict.fromkeys(
        ("betas", "diagnostics", "inference_geo", "user_profile_id", "workspace_id"), "there is one server and one user"
    ),
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
_MAX_NAMES = 100
_seen: set[str] = set()


def check_fields(extra: Mapping[str, Any]) -> None:
    """Raises ApiError, naming the field, if one requests what is not supported. `extra`: undeclared fields."""
    check_refused(extra, REFUSED)
    for name in extra:
        known = name in REFUSED or name in IGNORED or name in READ
        if not known and name not in _seen and len(_seen) < _MAX_NAMES:
            _seen.add(name)
            _log.warning("a request has the field %s, which is unknown and ignored", one_line(name))


def check_refused(given: Mapping[str, Any], table: Mapping[str, Refused], prefix: str = "") -> None:
    """Raises ApiError for a field of the table. `prefix`: of the fields' names."""
    for name, value in given.items():
        refused = table.get(name)
        if refused is None or value is None:
            continue
        if not any(type(value) is type(each) and value == each for each in refused.neutral):
            message = f"{prefix}{name} is not supported, got {one_line(value)}: {refused.reason}"
            raise ApiError(400, message, param=prefix + name)
