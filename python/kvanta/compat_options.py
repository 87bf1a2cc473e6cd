"""Options of vLLM, SGLang and Aphrodite: accepted without effect, refused with a reason, or the opposite of ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvanta.engine_options import by_name
from kvanta.errors import InputError
from kvanta.options import flag_of
from kvanta.values import one_line, truth

# Accepted without effect, with one line that says so. True: the flag takes a value.
IGNORED: Mapping[str, bool] = {
    "api_server_count": True,
    "async_scheduling": False,
    "attention_backend": True,
    "compilation_config": True,
    "cpu_offload_gb": True,
    "cuda_graph_max_bs": True,
    "data_parallel_size": True,
    "decode_log_interval": True,
    "disable_custom_all_reduce": False,
    "disable_fastapi_docs": False,
    "disable_frontend_multiprocessing": False,
    "disable_log_requests": False,
    "disable_log_stats": False,
    "disable_overlap_schedule": False,
    "dist_init_addr": True,
    "distributed_executor_backend": True,
    "download_dir": True,
    "dp": True,
    "dp_size": True,
    "enable_cache_report": False,
    "enable_chunked_prefill": False,
    "enable_log_requests": False,
    "enable_metrics": False,
    "enable_mixed_chunk": False,
    "enable_prompt_tokens_details": False,
    "enable_reasoning": False,
    "enable_request_id_headers": False,
    "enable_torch_compile": False,
    "generation_config": True,
    "gpu_memory_utilization": True,
    "grammar_backend": True,
    "guided_decoding_backend": True,
    "hf_token": True,
    "launch_kobold_api": False,
    "load_format": True,
    "log_level": True,
    "max_log_len": True,
    "max_logprobs": True,
    "max_parallel_loading_workers": True,
    "max_prefill_tokens": True,
    "max_total_tokens": True,
    "mem_fraction_static": True,
    "nnodes": True,
    "node_rank": True,
    "num_gpu_blocks_override": True,
    "pipeline_parallel_size": True,
    "pp": True,
    "pp_size": True,
    "response_role": True,
    "revision": True,
    "sampling_backend": True,
    "schedule_conservativeness": True,
    "schedule_policy": True,
    "scheduling_policy": True,
    "served_model_name": True,
    "show_time_cost": False,
    "skip_server_warmup": False,
    "speculative_algorithm": True,
    "speculative_config": True,
    "stream_interval": True,
    "structured_outputs_config": True,
    "swap_space": True,
    "tensor_parallel_size": True,
    "tokenizer_mode": True,
    "tokenizer_revision": True,
    "tp": True,
    "tp_size": True,
    "trust_remote_code": False,
    "watchdog_timeout": True,
}
SHORT_FLAGS = ("tp", "pp", "dp")


class Refusal(NamedTuple):
    """Reason for refusing an option. `neutral` values ask for nothing and are accepted, as None, False, empty."""

    reason: str
    neutral: tuple[str, ...] = ()


_LORA = Refusal("LoRA adapters are not supported; merge them into the weights")
_CONFIG = Refusal("edit the model's config.json")
_TEXT_MODELS = Refusal("only models that generate text are supported", ("auto", "generate", "none"))

# Options that would change the results and are not supported.
REFUSED: Mapping[str, Refusal] = {
    "convert": _TEXT_MODELS,
    "disable_sliding_window": Refusal("the model's own windows are always used"),
    "enable_lora": _LORA,
    "enable_prompt_embeds": Refusal("prompts are texts or token ids"),
    "hf_overrides": _CONFIG,
    "json_model_override_args": _CONFIG,
    "logits_processors": Refusal("use logit_bias or structured_outputs of a request"),
    "lora_modules": _LORA,
    "lora_paths": _LORA,
    "override_generation_config": Refusal("give the sampling parameters with each request"),
    "quantization": Refusal("weights are stored as --weight-dtype says, the cache as --kv-cache-dtype"),
    "quantization_config": Refusal("weights are stored as --weight-dtype says, the cache as --kv-cache-dtype"),
    "reasoning_parser": Refusal("kvanta serve separates reasoning from answers; LLM returns texts as they are"),
    "runner": _TEXT_MODELS,
    "skip_tokenizer_init": Refusal("the tokenizer is always loaded; token ids are accepted as prompts as well"),
}
OPPOSITES: Mapping[str, str] = {"disable_radix_cache": "enable_prefix_caching"}


def ignored_note(name: str) -> str:
    """The line for an option of IGNORED."""
    if name == "trust_remote_code":
        return "trust_remote_code is accepted, but no code of a model is ever run"
    return f"{name} is accepted for compatibility and does nothing here"


def check_refused(name: str, value: Any) -> None:
    """Raises InputError unless the value of an option of REFUSED asks for nothing. `value` may be a flag's text."""
    reason, neutral = REFUSED[name]
    given = value.lower() if isinstance(value, str) else value
    if given and given not in (*neutral, "none", "null", "false", "{}", "[]"):
        raise InputError(f"{name} is not supported, got {one_line(value)}: {reason}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message: "; did you mean X?", or nothing when no name is similar."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def known_arguments(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The engine options under their preferred names, and notes on options without effect.

    Raises InputError for an option that is unknown, refused or given twice. None asks for the default.
    """
    options = by_name()
    arguments: dict[str, Any] = {}
    notes = []
    for name, value in values.items():
        if name in options:
            target, setting = options[name].name, value
        elif name in OPPOSITES:
            target, setting = OPPOSITES[name], None if value is None else not truth(name, value)
        elif name in REFUSED:
            check_refused(name, value)
            continue
        elif name in IGNORED:
            notes += [] if value is None else [ignored_note(name)]
            continue
        else:
            raise InputError(f"unknown engine option {name!r}{nearest(name, [*options, *IGNORED, *REFUSED])}")
        if setting is None:
            continue
        if target in arguments:
            raise InputError(f"the engine option {target!r} is given twice: {arguments[target]!r} and {value!r}")
        arguments[target] = setting
    return arguments, notes


def flags_of(name: str) -> list[str]:
    """Command-line flags of an option of IGNORED or REFUSED."""
    return [flag_of(name), f"-{name}"] if name in SHORT_FLAGS else [flag_of(name)]
