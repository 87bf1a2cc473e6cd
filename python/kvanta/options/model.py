"""Options of loading a model, in addition to the engine's: downloads, defaults of requests, structured output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvanta.checkpoint.pooler_config import read_pooler_config
from kvanta.checkpoint.resolve import HubAccess, ModelFolder
from kvanta.constraints.structured_output import StructuredOutputsConfig
from kvanta.errors import InputError
from kvanta.kv_events.config import KvEventsConfig, read_kv_events_config
from kvanta.options.option import Option, OptionGroup, option
from kvanta.params.checks import one_line, text, truth
from kvanta.params.pooling_params import PoolingParams

_READERS = ("fastsafetensors", "instanttensor", "runai_streamer")  # further programs that read *.safetensors
_LOAD_FORMATS: Mapping[str, str] = {
    "auto": "",
    "hf": "safetensors",
    "safetensors": "safetensors",
    **dict.fromkeys(_READERS, "safetensors"),
    "gguf": "gguf",
}
_PICKLES = "only *.safetensors and GGUF files are read, because other formats may run code"
_REFUSED_FORMATS: Mapping[str, str] = {
    "dummy": "weights are never made up",
    "pt": _PICKLES,
    "npcache": _PICKLES,
    "bitsandbytes": "weights are read in their stored form; --weight-dtype stores them in fewer bits",
    "mistral": "give the folder in Hugging Face layout, with config.json",
}
_GUIDANCE = ("auto", "guidance", "llguidance")


def _name(value: Any) -> str:
    return text("the value", value).strip().lower()


def _load_format(value: Any) -> str:
    name = _name(value)
    if name not in _LOAD_FORMATS:
        reason = _REFUSED_FORMATS.get(name, "it is not known here")
        raise InputError(f"{one_line(value)} is not supported: {reason}; supported: {', '.join(_LOAD_FORMATS)}")
    return name


def _tokenizer_mode(value: Any) -> str:
    name = _name(value)
    if name in ("auto", "hf", "fast"):
        return name
    raise InputError(
        f"{one_line(value)} is not supported: the tokenizer is made of the model's own files by the package "
        "tokenizers, and no other one is here; supported: auto, hf, fast"
    )


def _backend(value: Any) -> str:
    name = _name(value).partition(":")[0]  # vLLM had guidance:disable-any-whitespace
    if name not in _GUIDANCE or ":" in str(value):
        raise InputError(
            f"{one_line(value)} is not supported: the package llguidance constrains texts; supported: "
            f"{', '.join(_GUIDANCE)}"
        )
    return name


def _json_object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        if value.strip().lower() in ("", "none", "null"):
            return {}
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InputError(f"{one_line(value)} is not JSON") from None
    if not isinstance(value, Mapping):
        raise InputError(f"{one_line(value)} is not an object")
    return dict(value)


def _token(value: Any) -> str | bool:
    return value if isinstance(value, bool) else text("the token", value)


@dataclass
class ModelOptions(OptionGroup):
    """Every option of loading. To add one: a field here, and its use in LoadedModel."""

    generation_config: str = option(
        "auto",
        "defaults of requests: auto (the model's generation_config.json), kvanta (none), or a folder with such a file",
        metavar="SOURCE",
        group="sampling",
    )
    override_generation_config: Mapping[str, Any] = option(
        "", "JSON with defaults of requests, in place of the file's", _json_object, metavar="JSON", group="sampling"
    )
    revision: str = option("", "branch, tag or commit of a hub id", metavar="REVISION", group="model")
    tokenizer_revision: str = option("", "the same for the tokenizer", metavar="REVISION", group="model")
    hf_token: str | bool = option("", "token for the hub", _token, metavar="TOKEN", group="model")
    download_dir: str = option("", "folder of downloads from the hub", metavar="FOLDER", group="model")
    load_format: str = option(
        "auto", f"one of {', '.join(_LOAD_FORMATS)}", _load_format, metavar="FORMAT", group="model"
    )
    tokenizer_mode: str = option(
        "auto", "auto, hf or fast, which are the same", _tokenizer_mode, metavar="MODE", group="model"
    )
    default_chat_template_kwargs: Mapping[str, Any] = option(
        "",
        "JSON with variables of the chat template, for requests that do not give them",
        _json_object,
        metavar="JSON",
        group="model",
    )
    structured_outputs_config: Mapping[str, Any] = option(
        "",
        "JSON with disable_additional_properties [true], disable_any_whitespace [false] or backend",
        _json_object,
        metavar="JSON",
        group="structured",
    )
    guided_decoding_backend: str = option(
        "auto", "auto or guidance", _backend, aliases=("grammar_backend",), metavar="NAME", group="structured"
    )
    guided_decoding_disable_any_whitespace: bool = option(
        False,
        "JSON without spaces between its parts",
        aliases=("constrained_json_disable_any_whitespace",),
        group="structured",
    )
    guided_decoding_disable_additional_properties: bool = option(
        False, "as by default: objects have the properties that the schema names, and no others", group="structured"
    )
    constrained_json_whitespace_pattern: str = option(
        "", "regular expression of the space between the parts of JSON", metavar="REGEX", group="structured"
    )

    auto_calibrate: bool = option(
        True,
        "calibrate +query on included texts when a model has no matrices for it, once; kept in $KVANTA_HOME",
        group="cache",
    )
    pooler_config: Mapping[str, Any] = option(
        "",
        "JSON with pooling_type (MEAN or LAST), normalize or dimensions: defaults of embeddings",
        _json_object,
        aliases=("override_pooler_config",),
        metavar="JSON",
        group="model",
    )

    kv_events_config: Mapping[str, Any] = option(
        "",
        'events of the prefix cache for routers: JSON as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}; '
        "docs/fleet.md has the keys",
        _json_object,
        metavar="JSON",
        group="prefix",
    )
    kv_events_endpoint: str = option("", "its endpoint alone, as in tcp://*:5557", metavar="ADDRESS", group="prefix")

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """Settings of KV events; None: events are off. Raises InputError."""
        return read_kv_events_config(self.kv_events_config, self.kv_events_endpoint)

    @property
    def pooling(self) -> PoolingParams:
        """Defaults of embeddings; None: the model's. Raises InputError that names the option."""
        return read_pooler_config(self.pooler_config)

    @property
    def hub(self) -> HubAccess:
        """Access to the hub for the model."""
        return HubAccess(self.revision, self.hf_token, self.download_dir)

    @property
    def tokenizer_hub(self) -> HubAccess:
        """Access to the hub for the tokenizer."""
        return HubAccess(self.tokenizer_revision, self.hf_token, self.download_dir)

    @property
    def structured_outputs(self) -> StructuredOutputsConfig:
        """Defaults of structured output. Raises InputError that names the option."""
        name = "structured_outputs_config"
        given = {key: value for key, value in self.structured_outputs_config.items() if value is not None}
        try:
            _backend(given.pop("backend", "auto"))
        except InputError as error:
            raise InputError(f"{name}: backend {error}") from None
        if given.pop("reasoning_parser", ""):
            raise InputError(f"{name}: give reasoning_parser as a separate option, --reasoning-parser")
        if given.pop("reasoning_parser_plugin", ""):
            raise InputError(f"{name}: reasoning_parser_plugin is not supported: no code of others is run")
        if given.pop("enable_in_reasoning", False):
            raise InputError(f"{name}: enable_in_reasoning is not supported: constraints begin after the reasoning")
        given.pop("disable_fallback", None)  # there is one backend, and so no other to fall back on
        closed = truth(f"{name}: disable_additional_properties", given.pop("disable_additional_properties", True))
        dense = truth(f"{name}: disable_any_whitespace", given.pop("disable_any_whitespace", False))
        if given:
            known = "backend, disable_additional_properties, disable_any_whitespace"
            raise InputError(f"{name} has {one_line(next(iter(given)))}; known: {known}")
        return StructuredOutputsConfig(
            disable_additional_properties=closed or self.guided_decoding_disable_additional_properties,
            disable_any_whitespace=dense or self.guided_decoding_disable_any_whitespace,
            whitespace_pattern=self.constrained_json_whitespace_pattern or None,
        )

    def check_format(self, folder: ModelFolder) -> None:
        """Raises InputError when `load_format` is not that of the model."""
        wanted = _LOAD_FORMATS[self.load_format]
        stored = "gguf" if Path(folder.name).suffix.lower() == ".gguf" else "safetensors"
        if wanted and wanted != stored:
            raise InputError(
                f"load_format is {self.load_format}, and {folder.name} is {stored}; auto takes what is there"
            )


OPTIONS: tuple[Option, ...] = ModelOptions.options()
