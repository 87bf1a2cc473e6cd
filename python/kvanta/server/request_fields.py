"""Fields of requests that vLLM, SGLang and OpenAI have and this server has not: refused, or without a meaning here.

A field that would change the answer is refused unless its value asks for nothing. Other fields that nobody knows are
ignored, as by vLLM, with one line in the log for each name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvanta.server.errors import ApiError
from kvanta.values import one_line

_log = logging.getLogger("kvanta.server")


class Refused(NamedTuple):
    """Reason for refusing a field, with what exists instead; the values that ask for nothing besides null."""

    reason: str
    neutral: tuple[Any, ...] = ()


_NOT_RETURNED = Refused("answers do not have it", (False,))
_IDS = "return_token_ids gives the ids of prompt and answer"
_EFFORT = "only chats have it, because the chat template reads it"

REFUSED: Mapping[str, Refused] = {
    "audio": Refused("answers are texts"),
    "chat_template": Refused("the server's own is used (--chat-template); chat_template_kwargs reach it"),
    "custom_logit_processor": Refused("no code of others is run; give logit_bias or structured_outputs"),
    "custom_params": Refused("they are for custom_logit_processor, which is not supported", ({},)),
    "documents": Refused("put them into the messages", ([],)),
    "function_call": Refused("give tool_choice", ("none", "auto")),
    "functions": Refused("give tools", ([],)),
    "input_ids": Refused("give them as prompt, or as input_ids, of /v1/completions"),
    "logprob_start_len": Refused("give prompt_logprobs", (-1,)),
    "lora_path": Refused("LoRA adapters are not supported; merge them into the weights", ("", [])),
    "lora_request": Refused("LoRA adapters are not supported; merge them into the weights"),
    "modalities": Refused("answers are texts", (["text"], [])),
    "prompt_embeds": Refused("prompts are texts or token ids"),
    "reasoning_effort": Refused(_EFFORT),
    "return_cached_tokens_details": Refused("usage.prompt_tokens_details.cached_tokens is always there", (False,)),
    "return_flat_raw_output_top_logprobs": Refused("give logprobs and top_logprobs", (False,)),
    "return_hidden_states": _NOT_RETURNED,
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
    "stop_regex": Refused("give stop, or structured_outputs with a regex", ("", [])),
    "stream_reasoning": Refused("reasoning is streamed as it is generated", (True,)),
    "suffix": Refused("models are not asked to fill in the middle", ("",)),
    "task": Refused("write it into the messages"),
    "thinking": Refused("give chat_template_kwargs, such as {'enable_thinking': false}"),
    "token_ids_logprob": Refused("logprobs are those of the most likely tokens"),
    "top_logprobs_num": Refused("give logprobs", (0,)),
    "verbosity": Refused("write it into the messages", ("medium",)),
    "vllm_xargs": Refused("there are no extensions that read them", ({},)),
    "watermark": Refused("texts are not marked", (False,)),
    "web_search_options": Refused("the server has no search"),
}

# Names and labels for the client's own use, pictures that no request has, and the paths of a cluster.
IGNORED = frozenset(
    (
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "custom_labels",
        "data_parallel_rank",
        "ec_transfer_params",
        "images_config",
        "kv_transfer_params",
        "max_dynamic_patch",
        "media_io_kwargs",
        "metadata",
        "min_dynamic_patch",
        "mm_payload",
        "mm_processor_kwargs",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "return_flat_raw_top_logprobs_b64",
        "return_mm_kwargs",
        "rid",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "use_audio_in_video",
        "video_config",
    )
)
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
    """Raises ApiError, naming the field, for one that asks for what is not supported. `extra`: undeclared fields."""
    for name, value in extra.items():
        refused = REFUSED.get(name)
        if refused is not None:
            if value is not None and not any(type(value) is type(each) and value == each for each in refused.neutral):
                message = f"{name} is not supported, got {one_line(value)}: {refused.reason}"
                raise ApiError(400, message, param=name)
        elif name not in IGNORED and name not in READ and name not in _seen and len(_seen) < _MAX_NAMES:
            _seen.add(name)
            _log.warning("a request has the field %s, which is unknown and ignored", one_line(name))
