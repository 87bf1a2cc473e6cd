"""A model in memory, for LLM and the server: its folder, tokenizer and engine."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from kvanta import _core
from kvanta.checkpoint.checks import check_model_folder
from kvanta.checkpoint.end_tokens import tokenizer_ends
from kvanta.checkpoint.fact import Fact
from kvanta.checkpoint.facts import model_facts
from kvanta.checkpoint.generation_config import default_sampling, describe
from kvanta.checkpoint.pooler_config import default_pooling
from kvanta.checkpoint.resolve import ModelFolder, resolve_model
from kvanta.constraints.structured_output import GrammarCompiler, fill_masks
from kvanta.engine.config import draft_config, engine_config, shortened
from kvanta.engine.ranks import RankProcesses, engine_with_ranks
from kvanta.engine.summary import EngineSummary, summarize
from kvanta.errors import InputError, reason_of
from kvanta.files.json_file import read_regular_file
from kvanta.kv_events.config import KvEventsConfig
from kvanta.kv_events.event_thread import EventConsumer, KvEventThread
from kvanta.options.ages import with_ages
from kvanta.options.engine import EngineOptions
from kvanta.options.model import ModelOptions
from kvanta.options.scheme_file import is_scheme_file
from kvanta.params.checks import one_line
from kvanta.parsers import written_calls
from kvanta.terminal.memory_limits import about_memory
from kvanta.text.chat_template import MAX_TEMPLATE_BYTES
from kvanta.text.tokenizer import Tokenizer

_log = logging.getLogger("kvanta")


AddMatrices = Callable[[_core.EngineConfig, str, Mapping[str, Any], bool], None]
"""calibration.automatic.add_query_matrices, which makes what a cache's format needs and the model does not have."""


def node_config(
    model: str | PathLike[str], arguments: Mapping[str, Any], add_matrices: AddMatrices
) -> _core.EngineConfig:
    """The configuration of the ranks on a node other than 0, which has neither tokenizer nor engine."""
    options = ModelOptions.read(arguments)
    folder = _checked_model(model, arguments, options)
    config = engine_config(str(folder.path), arguments)
    add_matrices(config, folder.name, arguments, options.auto_calibrate)
    return config


def _checked_model(model: str | PathLike[str], arguments: Mapping[str, Any], options: ModelOptions) -> ModelFolder:
    EngineOptions.read(arguments)  # before anything is downloaded
    folder = resolve_model(model, options.hub)
    options.check_format(folder)
    if folder.path.is_dir():
        check_model_folder(folder.path)
    return folder


class LoadedModel:
    """Loads weights and reserves the cache. Raises InputError or ResourceError."""

    def __init__(
        self,
        model: str | PathLike[str],
        arguments: Mapping[str, Any],
        tokenizer: str | PathLike[str] | None = None,
        chat_template: str | PathLike[str] | None = None,
        *,
        add_matrices: AddMatrices | None = None,
        make_engine: Callable[[_core.EngineConfig], _core.Engine] | None = None,
        compiler: type[GrammarCompiler] = GrammarCompiler,
        on_kv_events: EventConsumer | None = None,
        rank: int = 0,
    ) -> None:
        """`arguments`: EngineOptions and ModelOptions by name. `tokenizer`, `chat_template`: instead of the model's.

        `add_matrices`: without it, a format whose matrices are missing is an error. `make_engine`: gives an engine
        elsewhere, so that no weights are read here, with its `compiler` of grammars. `on_kv_events`: takes the changes
        of the prefix cache, if there is one. `rank`: of several engines, for the ports of KV events.
        """
        options = ModelOptions.read(arguments)
        structured_outputs, pooling, kv_events = options.structured_outputs, options.pooling, options.kv_events
        folder = _checked_model(model, arguments, options)
        self.name = folder.name
        self._path = folder.path
        self._arguments = {name: arguments.get(name) for name in EngineOptions.__dataclass_fields__}
        config = engine_config(str(folder.path), arguments)
        scheme = with_ages(arguments).get("kv_cache_dtype")
        self._scheme_file = scheme if is_scheme_file(scheme) else None
        self.default_sampling = default_sampling(
            folder.path, options.generation_config, options.override_generation_config
        )
        """Fields of SamplingParams for requests that do not give them."""
        if self.default_sampling:
            _log.info("defaults of requests: %s (--generation-config)", describe(self.default_sampling))
        self.default_pooling = default_pooling(folder.path, pooling)
        """PoolingParams of embeddings, without None for what has a default."""
        if tokenizer is not None or options.tokenizer_revision not in ("", options.revision):
            source = resolve_model(model if tokenizer is None else tokenizer, options.tokenizer_hub)
        else:
            source = folder
        self.tokenizer = Tokenizer(source.path)
        config.eos_token_ids = tokenizer_ends(self.tokenizer)
        _check_draft_tokenizer(config, self.tokenizer)
        self.tokenizer.tool_syntax = written_calls.DEFAULT
        if chat_template is not None:
            self.tokenizer.use_chat_template(_read_template(str(chat_template)))
        self.tokenizer.template_defaults = options.default_chat_template_kwargs
        self.warnings: list[str] = list(self.tokenizer.warnings)
        """Warnings of the engine that nobody has read yet; its thread may append more."""
        if warning := shortened(config, arguments):
            self.warnings.append(warning)
        self._ranks: RankProcesses | None = None
        if make_engine is not None:
            self.engine = make_engine(config)
        else:
            if add_matrices is not None:
                add_matrices(config, folder.name, arguments, options.auto_calibrate)
            config.set_on_warning(self.warnings.append)
            config.set_fill_masks(fill_masks)
            if not config.enable_prefix_caching:
                on_kv_events = None
            if kv_events is not None or on_kv_events is not None:
                config.kv_events_queue_size = (kv_events or KvEventsConfig()).max_queue_size
            if warning := _too_many_threads(config.threads):
                self.warnings.append(warning)
            with about_memory():
                self.engine, self._ranks = engine_with_ranks(config)
            self._give_out_events(kv_events, on_kv_events, rank)
        self.tokenizer.vocab = int(self.engine.info.vocab)
        size, dimensions = int(self.engine.info.embedding_size), self.default_pooling.dimensions
        if dimensions is not None and dimensions > size:
            raise InputError(f"pooler_config: dimensions must be at most the hidden size, {size}, got {dimensions}")
        self.grammars = compiler(self.tokenizer, self.engine.info, structured_outputs)

    def _give_out_events(self, config: KvEventsConfig | None, consumer: EventConsumer | None, rank: int) -> None:
        consumers = [] if consumer is None else [consumer]
        if config is not None:
            from kvanta.kv_events.publisher import KvEventPublisher

            publisher = KvEventPublisher(self.engine, config, rank=rank)
            replay = f", replay on {publisher.replay_endpoint}" if publisher.replay_endpoint else ""
            _log.info("KV events on %s%s: they have the token ids of prompts", publisher.endpoint, replay)
            consumers.append(publisher)
        if consumers:
            weakref.finalize(self, KvEventThread(self.engine, consumers).close)

    @property
    def lost_rank(self) -> str:
        """The rank without which the engine cannot go on, and the reason; empty: none."""
        return self._ranks.lost if self._ranks else ""

    def stats(self) -> dict[str, Any]:
        """Counters of the engine, with the names of model and cache format."""
        cache = self._scheme_file or self.engine.config.kv_cache_dtype
        return {"model": self.name, "kv_cache_dtype": cache, **self.engine.stats()}

    @functools.cached_property
    def facts(self) -> list[Fact]:
        """The facts of the model's files that are in use, with the place of each."""
        return model_facts(self._path, self.engine.info, self.tokenizer, self.default_sampling).facts

    def summary(self) -> EngineSummary:
        """Device, weights, and what the cache holds."""
        return summarize(self.engine.config, self.engine.info, self.stats(), self._arguments)


def _too_many_threads(threads: int) -> str:
    """A warning; empty: there are as many CPUs."""
    cpus = len(os.sched_getaffinity(0))
    if threads <= cpus:
        return ""
    return f"threads is {threads}, and this process may use {cpus} CPUs: more threads than CPUs slow each other down"


def _check_draft_tokenizer(config: _core.EngineConfig, tokenizer: Tokenizer) -> None:
    """A draft model's tokens must be the model's; one without a tokenizer is taken at its word."""
    draft = draft_config(config.speculative_config)
    if not draft or draft["model"] == config.model:
        return
    try:
        other = Tokenizer(draft["model"])
    except InputError:
        return
    if (token := tokenizer.first_difference(other)) is not None:
        ours, theirs = (one_line(each.vocabulary.get(token, "missing")) for each in (tokenizer, other))
        raise InputError(
            f"speculative_config: draft model {draft['model']!r} has another vocabulary: token {token} is {theirs}, "
            f"and {ours} in the model's; they must be equal"
        )


def _read_template(source: str) -> str:
    """The template in a file, or `source` itself if it is one, as in vLLM."""
    if "{" in source and "}" in source:
        return source
    try:
        return read_regular_file(Path(source), MAX_TEMPLATE_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"the chat template {source!r} cannot be read: {reason_of(error)}") from None
