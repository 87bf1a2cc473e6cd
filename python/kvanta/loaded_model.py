"""A model in memory, for LLM and the server: its folder, tokenizer and engine."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from kvanta import _core
from kvanta.engine_options import engine_config
from kvanta.errors import InputError
from kvanta.model_folder import check_model_folder
from kvanta.models import resolve_model
from kvanta.scheme_file import is_scheme_file
from kvanta.structured_output import GrammarCompiler, fill_masks
from kvanta.tokenizer import Tokenizer


class LoadedModel:
    """Loads weights and reserves the cache. Raises InputError or ResourceError."""

    def __init__(
        self,
        model: str | PathLike[str],
        arguments: Mapping[str, Any],
        tokenizer: str | PathLike[str] | None = None,
        chat_template: str | PathLike[str] | None = None,
    ) -> None:
        """`arguments`: EngineOptions by name. `tokenizer`, `chat_template`: in place of the model's own."""
        folder = resolve_model(model)
        self.name = folder.name
        if folder.path.is_dir():
            check_model_folder(folder.path)
        config = engine_config(str(folder.path), arguments)
        scheme = arguments.get("kv_cache_dtype")
        self._scheme_file = scheme if is_scheme_file(scheme) else None
        self.tokenizer = Tokenizer(folder.path if tokenizer is None else resolve_model(tokenizer).path)
        if chat_template is not None:
            self.tokenizer.use_chat_template(_read_template(str(chat_template)))
        self.warnings: list[str] = []
        """Warnings of the engine that nobody has read yet; its thread may append more."""
        config.set_on_warning(self.warnings.append)
        config.set_fill_masks(fill_masks)
        self.engine = _core.Engine(config)
        self.grammars = GrammarCompiler(self.tokenizer, self.engine.info)

    def stats(self) -> dict[str, Any]:
        """Counters of the engine, with the names of model and cache format."""
        cache = self._scheme_file or self.engine.config.kv_cache_dtype
        return {"model": self.name, "kv_cache_dtype": cache, **self.engine.stats()}


def _read_template(source: str) -> str:
    """The template in a file, or `source` itself if it is one, as in vLLM."""
    if "{" in source and "}" in source:
        return source
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"the chat template {source!r} cannot be read: {error}") from None
