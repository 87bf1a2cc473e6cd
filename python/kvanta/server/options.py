"""Options of `kvanta serve`: one dataclass gives its flags, their aliases and the server's settings."""

from __future__ import annotations

import ipaddress
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvanta.errors import InputError
from kvanta.options.option import Option, OptionGroup, option, parse_bytes
from kvanta.params.checks import whole_number
from kvanta.parsers.harmony import HARMONY_PARSER
from kvanta.parsers.reasoning import FORMATS, HARMONY, format_name
from kvanta.parsers.tool_calls import PARSERS, parser_name

KEY_VARIABLE = "KVANTA_API_KEY"
ROUTINGS = ("prefix-aware", "round-robin")
_LEVELS = ("debug", "info", "warning", "error", "critical")


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


def _positive(value: Any) -> int:
    return _whole(value, 1, 2**31 - 1)


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < 1e9:
        raise InputError(f"{value!r} is not a number of seconds")
    return seconds


def _path(value: Any) -> str:
    path = str(value)
    if path and not path.startswith("/"):
        raise InputError(f"{path!r} does not begin with /")
    return path


def _words(value: Any) -> list[str]:
    """Words separated by commas, as in Aphrodite, or one JSON list of texts, as in vLLM's origins."""
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
            raise InputError(f"{word!r} is neither a list of words nor a JSON list of texts")
        words += listed
    return words


def _paths(value: Any) -> list[str]:
    return [_path(word) for word in _words(value)]


def _proxies(value: Any) -> str:
    """Addresses or networks, with commas between, or * alone: uvicorn would ignore anything else without a word."""
    proxies = [each.strip() for each in str(value).split(",") if each.strip()]
    for each in proxies if proxies != ["*"] else ():
        try:
            ipaddress.ip_network(each)
        except ValueError as error:
            known = "addresses and networks, such as 10.0.0.0/8, with commas between, or * alone"
            raise InputError(f"{error}; known: {known}") from None
    return ",".join(proxies)


def _keys(value: Any) -> list[str]:
    """Keys are not split: one may have commas."""
    return [value] if isinstance(value, str) else list(value)


@dataclass
class ServerOptions(OptionGroup):
    """Every server option. To add one: a field here, and its use in server/run.py."""

    host: str = option(
        "127.0.0.1", "address to listen on; 0.0.0.0 for every network", metavar="HOST", group="server", shown=("serve",)
    )
    port: int = option(
        8000, "port to listen on; 0 takes a free one", _port, metavar="PORT", group="server", shown=("serve",)
    )
    uds: str = option(
        "",
        "Unix domain socket to listen on, in place of a host and a port; only this user's processes reach it",
        metavar="PATH",
        group="server",
    )
    api_key: list[str] = option(
        (),
        f"keys of clients; ${KEY_VARIABLE} keeps one out of the process list",
        _keys,
        aliases=("api_keys",),
        is_list=True,
        metavar="KEY",
        group="access",
        shown=("serve",),
    )
    served_model_name: list[str] = option(
        (),
        "names of the model for clients; '*' takes every name [MODEL]",
        _words,
        aliases=("served_model_names",),
        is_list=True,
        metavar="NAME",
        group="server",
        shown=("serve",),
    )
    models: str = option(
        "",
        "several models in place of MODEL: a YAML or JSON file that lists them; each is loaded when a request names it",
        metavar="FILE",
        group="server",
        shown=("serve",),
    )
    memory_budget: int = option(
        0,
        "weights and caches of the --models in memory; those used least recently are unloaded [80 % of free memory]",
        parse_bytes,
        metavar="SIZE",
        group="server",
    )
    store_responses: int = option(
        0,
        "bytes of responses of /v1/responses that are kept for an hour, as 64MiB; 0: none",
        parse_bytes,
        metavar="BYTES",
        group="server",
    )
    unsupported_content: str = option(
        "refuse",
        "pictures, sound and files in messages: refuse the request, or note in the text that they are not read",
        str.lower,
        choices=("refuse", "note"),
        metavar="HOW",
        group="server",
    )
    tokenizer: str = option(
        "",
        "model whose tokenizer and chat template are used instead",
        aliases=("tokenizer_path",),
        metavar="MODEL",
        group="model",
    )
    chat_template: str = option(
        "", "file with a Jinja2 template in place of the model's own", metavar="FILE", group="model"
    )
    replicas: int = option(
        1,
        "engines with a cache each, by Ray Serve (pip install 'kvanta[ray]'); requests go where their prefix is cached",
        _positive,
        metavar="N",
        group="parallel",
    )
    prefill_replicas: int = option(
        0,
        "further engines, which compute the prompts of the --replicas and pass their pages on by --kv-store",
        _count,
        metavar="N",
        group="parallel",
    )
    replica_routing: str = option(
        "prefix-aware",
        "prefix-aware: a request goes where its prefix is cached; round-robin: to the replicas in turn",
        str.lower,
        choices=ROUTINGS,
        metavar="ROUTING",
        group="parallel",
    )
    request_timeout: float = option(
        0, "seconds until a request is ended with status 504; 0: never", _seconds, metavar="S", group="limits"
    )
    shutdown_timeout: float = option(
        60, "seconds that running requests may take to finish after SIGTERM", _seconds, metavar="S", group="limits"
    )
    stream_ping_seconds: float = option(
        15,
        "seconds without an event after which a stream sends a comment that keeps its connection open; 0: never",
        _seconds,
        aliases=("sse_ping_interval",),
        metavar="S",
        group="server",
    )
    max_logprobs: int = option(20, "maximum log-probabilities per token", _count, metavar="N", group="limits")
    tool_call_parser: str = option(
        "",
        f"syntax of the model's tool calls: {', '.join(PARSERS)}; without it they stay text",
        parser_name,
        metavar="NAME",
        group="parsers",
        shown=("serve",),
    )
    reasoning_parser: str = option(
        "",
        f"format of the model's reasoning: {', '.join(FORMATS)}; without it, it stays part of the text",
        format_name,
        metavar="NAME",
        group="parsers",
        shown=("serve",),
    )
    metrics_prefix: str = option(
        "kvanta",
        "vllm: /metrics has vLLM's names, too, for its dashboards and autoscalers",
        str.lower,
        choices=("kvanta", "vllm"),
        metavar="PREFIX",
        group="logging",
    )
    enable_auto_tool_choice: bool = option(False, "as in vLLM; implied by --tool-call-parser", group="parsers")
    max_body_bytes: int = option(
        4 << 20, "maximum size of a request's body", parse_bytes, metavar="SIZE", group="limits"
    )
    h11_max_header_count: int = option(
        256, "maximum number of a request's headers", _positive, metavar="N", group="limits"
    )
    max_connections: int = option(4096, "maximum connections at one time", _positive, metavar="N", group="limits")
    header_timeout: float = option(
        20, "seconds for a connection to send a request's header", _seconds, metavar="S", group="limits"
    )
    allowed_hosts: list[str] = option(
        (),
        "names under which clients may call the server, in addition to loopback ones and HOST; * for all; checked on a "
        "loopback address without keys, and wherever the option is given",
        _words,
        is_list=True,
        metavar="NAME",
        group="access",
    )
    forwarded_allow_ips: str = option(
        "",
        "addresses of proxies whose X-Forwarded-For is trusted, with commas between; * for all",
        _proxies,
        metavar="ADDRESSES",
        group="access",
    )
    allowed_origins: list[str] = option(
        (),
        "web origins whose pages may call the server (CORS); * for all",
        _words,
        aliases=("cors_origins",),
        is_list=True,
        metavar="ORIGIN",
        group="access",
    )
    allow_credentials: bool = option(False, "CORS: let pages send cookies and keys", group="access")
    allowed_methods: list[str] = option(("*",), "CORS: methods", _words, is_list=True, metavar="METHOD", group="access")
    allowed_headers: list[str] = option(("*",), "CORS: headers", _words, is_list=True, metavar="HEADER", group="access")
    ssl_keyfile: str = option("", "private key for HTTPS", metavar="FILE", group="access")
    ssl_certfile: str = option("", "certificate for HTTPS", metavar="FILE", group="access")
    root_path: str = option(
        "",
        "path prefix at which a proxy serves this server",
        _path,
        aliases=("fastapi_root_path",),
        metavar="PATH",
        group="server",
    )
    log_level: str = option(
        "info",
        "debug, info, warning, error or critical",
        str.lower,
        aliases=("uvicorn_log_level", "log_level_http"),
        choices=_LEVELS,
        metavar="LEVEL",
        group="logging",
    )
    log_requests: bool = option(True, "one line per request", group="logging")
    disable_access_log_for_endpoints: list[str] = option(
        ("/health", "/ping", "/metrics", "/page"),
        "paths whose requests get no line, with everything below them; '' for none",
        _paths,
        aliases=("uvicorn_access_log_exclude_prefixes",),
        is_list=True,
        metavar="PATH",
        group="logging",
    )
    disable_fastapi_docs: bool = option(False, "no /openapi.json", group="server")


OPTIONS: tuple[Option, ...] = ServerOptions.options()
# Other servers' names for the opposite.
OPPOSITES: Mapping[str, str] = {
    "disable_log_requests": "log_requests",
    "disable_uvicorn_access_log": "log_requests",
}


def read_options(given: Mapping[str, Any]) -> ServerOptions:
    """The server's settings; absent or None: the default. Raises InputError that names the option."""
    options = ServerOptions.read(given)
    if given.get("api_key") is None:
        key = os.environ.get(KEY_VARIABLE, "")
        options.api_key = [key] if key else []
    elif (
        not all(options.api_key) or not options.api_key
    ):  # such as an unset variable of the shell; it must not open the server
        raise InputError("api_key is empty; leave the option out for a server without keys")
    if any(not key.isprintable() or key != key.strip() for key in options.api_key):
        raise InputError("api_key: a key has characters that a header cannot carry")
    if options.enable_auto_tool_choice and not options.tool_call_parser:
        raise InputError(f"enable_auto_tool_choice needs tool_call_parser: {', '.join(PARSERS)}")
    reasoning = FORMATS.get(options.reasoning_parser)
    if (
        reasoning
        and options.tool_call_parser
        and (reasoning is HARMONY) != (options.tool_call_parser == HARMONY_PARSER)
    ):
        raise InputError(
            f"tool_call_parser {options.tool_call_parser} and reasoning_parser {options.reasoning_parser} exclude each "
            f"other: {HARMONY_PARSER} and openai_gptoss are for GPT-OSS, which needs no other parser"
        )
    if bool(options.ssl_keyfile) != bool(options.ssl_certfile):
        raise InputError("HTTPS needs both ssl_keyfile and ssl_certfile")
    if options.header_timeout == 0:
        raise InputError("header_timeout must be a positive number of seconds, got 0")
    whole_number("max_body_bytes", options.max_body_bytes, 1024, 2**40)
    return options
