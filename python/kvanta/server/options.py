"""The one list of the server's own options: flags of `kvanta serve`, with the names that other servers give them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvanta.engine_options import EngineOption as Option
from kvanta.engine_options import parse_bytes
from kvanta.errors import InputError
from kvanta.server.tool_calls import PARSERS, parser_name
from kvanta.values import whole_number

KEY_VARIABLE = "KVANTA_API_KEY"


def _port(value: Any) -> int:
    return _whole(value, 0, 65535)


def _count(value: Any) -> int:
    return _whole(value, 0, 2**31 - 1)


def _whole(value: Any, low: int, high: int) -> int:
    try:
        number = int(value)
    except ValueError:
        raise InputError(f"{value!r} is not a whole number") from None
    if not low <= number <= high:
        raise InputError(f"{value!r} is not a whole number in {low}..{high}")
    return number


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < 1e9:
        raise InputError(f"{value!r} is not a number of seconds")
    return seconds


def _words(value: Any) -> list[str]:
    """Several words, or one JSON list of texts, which is how vLLM takes origins; Aphrodite separates by commas."""
    words: list[str] = []
    for word in [value] if isinstance(value, str) else value:
        if not word.startswith("["):
            words += [part for part in word.split(",") if part]
            continue
        try:
            listed = json.loads(word)
        except (ValueError, RecursionError):
            listed = None
        if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
            raise InputError(f"{word!r} is neither words nor a JSON list of texts")
        words += listed
    return words


OPTIONS: tuple[Option, ...] = (
    Option("host", "address to listen on; 0.0.0.0 for every network", "127.0.0.1", str, metavar="HOST"),
    Option("port", "port to listen on; 0 takes a free one", 8000, _port, metavar="PORT"),
    Option(
        "api_key",
        f"keys that clients must send one of; ${KEY_VARIABLE} keeps them out of the list of processes",
        (),
        _words,
        ("api_keys",),
        is_list=True,
        metavar="KEY",
    ),
    Option(
        "served_model_name",
        "names under which clients ask for the model [MODEL]",
        (),
        _words,
        ("served_model_names",),
        is_list=True,
        metavar="NAME",
    ),
    Option(
        "tokenizer",
        "take the tokenizer and the chat template from there",
        "",
        str,
        ("tokenizer_path",),
        metavar="MODEL",
    ),
    Option("chat_template", "file with a Jinja2 template in place of the model's own", "", str, metavar="FILE"),
    Option("request_timeout", "seconds until a request is given up with 504; 0: never", 0, _seconds, metavar="S"),
    Option("shutdown_timeout", "seconds that running requests get to finish after SIGTERM", 60, _seconds, metavar="S"),
    Option("max_logprobs", "most log-probabilities per token", 20, _count, metavar="N"),
    Option(
        "tool_call_parser",
        f"how the model writes calls of functions: {', '.join(PARSERS)}; without, they stay text",
        "",
        parser_name,
        metavar="NAME",
    ),
    Option("enable_auto_tool_choice", "as vLLM has it; implied by --tool-call-parser", False, bool, is_flag=True),
    Option("max_body_bytes", "largest body of a request", 4 << 20, parse_bytes, metavar="SIZE"),
    Option(
        "allowed_origins",
        "web origins whose pages may call the server (CORS); * for all",
        (),
        _words,
        ("cors_origins",),
        is_list=True,
        metavar="ORIGIN",
    ),
    Option("allow_credentials", "CORS: let pages send cookies and keys", False, bool, is_flag=True),
    Option("allowed_methods", "CORS: methods", ("*",), _words, is_list=True, metavar="METHOD"),
    Option("allowed_headers", "CORS: headers", ("*",), _words, is_list=True, metavar="HEADER"),
    Option("ssl_keyfile", "private key for HTTPS", "", str, metavar="FILE"),
    Option("ssl_certfile", "certificate for HTTPS", "", str, metavar="FILE"),
    Option("root_path", "path under which a proxy shows the server", "", str, metavar="PATH"),
    Option(
        "log_level",
        "debug, info, warning, error or critical",
        "info",
        str.lower,
        ("uvicorn_log_level", "log_level_http"),
        ("debug", "info", "warning", "error", "critical"),
        metavar="LEVEL",
    ),
    Option("log_requests", "one line per request", True, bool, is_flag=True),
)
# Other servers' words for the opposite.
OPPOSITES: Mapping[str, str] = {
    "disable_log_requests": "log_requests",
    "disable_uvicorn_access_log": "log_requests",
}

# Options of other servers that mean nothing here. True: it takes a value.
FOREIGN: Mapping[str, bool] = {
    "enable_prompt_tokens_details": False,
    "enable_request_id_headers": False,
    "enable_log_requests": False,
    "enable_cache_report": False,
    "enable_metrics": False,
    "reasoning_parser": True,
    "response_role": True,
    "generation_config": True,
    "guided_decoding_backend": True,
    "structured_outputs_config": True,
    "grammar_backend": True,
    "sampling_backend": True,
    "stream_interval": True,
    "decode_log_interval": True,
    "skip_server_warmup": False,
    "show_time_cost": False,
    "watchdog_timeout": True,
    "disable_fastapi_docs": False,
    "disable_frontend_multiprocessing": False,
    "max_log_len": True,
    "api_server_count": True,
    "nnodes": True,
    "node_rank": True,
    "dist_init_addr": True,
    "launch_kobold_api": False,
}

# What would change a model's answers, and is not built: refused, with the reason.
REFUSED: Mapping[str, str] = {
    "quantization": "weights are not quantized here; the cache is, see --kv-cache-dtype",
    "enable_lora": "LoRA adapters are not built; merge them into the weights",
    "lora_modules": "LoRA adapters are not built; merge them into the weights",
    "lora_paths": "LoRA adapters are not built; merge them into the weights",
    "hf_overrides": "edit the model's config.json",
    "json_model_override_args": "edit the model's config.json",
    "disable_sliding_window": "the model's own windows are always used",
    "skip_tokenizer_init": "the server needs the tokenizer; send token ids as prompts to go without it",
}


@dataclass
class ServerOptions:
    """What `kvanta serve` was told about HTTP."""

    host: str
    port: int
    api_key: list[str]
    served_model_name: list[str]
    tokenizer: str
    chat_template: str
    request_timeout: float
    shutdown_timeout: float
    max_logprobs: int
    tool_call_parser: str
    enable_auto_tool_choice: bool
    max_body_bytes: int
    allowed_origins: list[str]
    allow_credentials: bool
    allowed_methods: list[str]
    allowed_headers: list[str]
    ssl_keyfile: str
    ssl_certfile: str
    root_path: str
    log_level: str
    log_requests: bool


def read_options(given: Mapping[str, Any]) -> ServerOptions:
    """Absent or None: the default. Raises InputError that names the option."""
    values: dict[str, Any] = {}
    for option in OPTIONS:
        value = given.get(option.name)
        values[option.name] = option.read(option.default if value is None else value)
    options = ServerOptions(**values)
    if given.get("api_key") is None:
        options.api_key = _words(os.environ.get(KEY_VARIABLE, ""))
    elif not options.api_key:  # as of an unset variable of the shell: an open server is not what was meant
        raise InputError("api_key is empty; leave the option out for a server without keys")
    if any(not key.isprintable() or key != key.strip() for key in options.api_key):
        raise InputError("api_key: a key has characters that a header cannot carry")
    if options.enable_auto_tool_choice and not options.tool_call_parser:
        raise InputError(f"enable_auto_tool_choice needs tool_call_parser: {', '.join(PARSERS)}")
    if bool(options.ssl_keyfile) != bool(options.ssl_certfile):
        raise InputError("HTTPS needs both ssl_keyfile and ssl_certfile")
    whole_number("max_body_bytes", options.max_body_bytes, 1024, 2**40)
    return options
