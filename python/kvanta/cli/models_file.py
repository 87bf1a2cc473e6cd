"""`kvanta serve --models FILE`: the models that a YAML or JSON file lists, with the options of each."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvanta.cli.arguments import CommandParser, engine_arguments, given_options
from kvanta.cli.config_file import option_words, read_config
from kvanta.errors import InputError
from kvanta.options.option import parse_bytes
from kvanta.params.checks import nearest, one_line
from kvanta.server.models.entry import ModelEntry
from kvanta.server.models.keep_alive import read_keep_alive
from kvanta.server.options import OPTIONS, ServerOptions

_OF_FILE = ("models", "default", "memory_budget")
_OF_MODEL = ("name", "path", "options", "memory", "keep_alive")
# Options of the server in front of the models, whatever they are.
_OF_SERVER = frozenset(
    (
        *("host", "port", "uds", "models", "memory_budget", "root_path", "disable_fastapi_docs"),
        *("api_key", "allowed_hosts", "forwarded_allow_ips", "ssl_keyfile", "ssl_certfile"),
        *("allowed_origins", "allow_credentials", "allowed_methods", "allowed_headers"),
        *("log_level", "log_requests", "disable_access_log_for_endpoints"),
        *("max_body_bytes", "h11_max_header_count", "max_connections", "header_timeout", "shutdown_timeout"),
    )
)
_OF_ONE_MODEL = frozenset(("served_model_name", "replicas", "prefill_replicas", "nnodes", "node_rank"))


class ModelsFile(NamedTuple):
    """The models of a server."""

    entries: list[ModelEntry]
    default: str | None
    """Name of the model of requests that name none, or an unknown one."""
    common: dict[str, Any]
    """Options of the command line that are those of every model."""
    options: ServerOptions


def read_models(parser: CommandParser, values: argparse.Namespace, options: ServerOptions) -> ModelsFile:
    """The file that --models names. `values`: the command line. Raises InputError."""
    if values.MODEL is not None or values.model_option is not None:
        raise InputError("--models and MODEL exclude each other: the file lists the models")
    where = f"--models {options.models}"
    content = _checked(read_config(Path(options.models).expanduser(), "--models"), _OF_FILE, where)
    common = _options(values, "the command line")
    listed = content.get("models")
    if not isinstance(listed, list) or not listed:
        raise InputError(f"{where}: models must be a list of at least one model, got {one_line(listed)}")
    entries: list[ModelEntry] = []
    for index, each in enumerate(listed):
        entry = _entry(parser, each, f"{where}: models[{index}]")
        if entry.name in (other.name for other in entries):
            raise InputError(f"{where}: two models have the name {entry.name!r}")
        entries.append(entry)
    default = content.get("default")
    names = [entry.name for entry in entries]
    if default is not None and default not in names:
        raise InputError(f"{where}: default is {one_line(default)}, which is none of {', '.join(names)}")
    if (budget := content.get("memory_budget")) is not None and not options.memory_budget:
        options = dataclasses.replace(options, memory_budget=_bytes(budget, f"{where}: memory_budget"))
    return ModelsFile(entries, default, common, options)


def _entry(parser: CommandParser, given: Any, where: str) -> ModelEntry:
    if not isinstance(given, Mapping):
        raise InputError(f"{where} must have name and path, got {one_line(given)}")
    fields = _checked(given, _OF_MODEL, where)
    for name in ("name", "path"):
        if not isinstance(fields.get(name), str) or not fields[name]:
            raise InputError(f"{where}: {name} must be a text, got {one_line(fields.get(name))}")
    options = fields.get("options") or {}
    if not isinstance(options, Mapping):
        raise InputError(f"{where}: options must be options of kvanta serve by name, got {one_line(options)}")
    words, model = option_words(parser, options, where)
    if model is not None:
        raise InputError(f"{where}: the model is its path, got the option model {model!r}")
    memory, keep_alive = fields.get("memory"), fields.get("keep_alive")
    return ModelEntry(
        fields["name"],
        fields["path"],
        _options(parser.parse_exactly(words), where),
        None if memory is None else _bytes(memory, f"{where}: memory"),
        math.inf if keep_alive is None else read_keep_alive(keep_alive, f"{where}: keep_alive"),
    )


def _options(values: argparse.Namespace, where: str) -> dict[str, Any]:
    """The options of a model by their first names."""
    given = {**given_options(values, OPTIONS), **engine_arguments(values)}
    refused = [name for name in given if name in _OF_ONE_MODEL]
    if refused:
        raise InputError(f"{where}: {refused[0]} is not supported with --models")
    if where == "the command line":
        return {name: value for name, value in given.items() if name not in _OF_SERVER}
    if refused := [name for name in given if name in _OF_SERVER]:
        raise InputError(f"{where}: {refused[0]} is the server's: give it on the command line")
    return given


def _checked(fields: Mapping[str, Any], known: tuple[str, ...], where: str) -> dict[str, Any]:
    """The fields under their names with underscores."""
    named = {str(key).replace("-", "_"): value for key, value in fields.items()}
    for name in named:
        if name not in known:
            raise InputError(f"{where}: unknown field {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return named


def _bytes(value: Any, where: str) -> int:
    try:
        return parse_bytes(value)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
