"""A model in memory: its folder, tokenizer and engine. What LLM and the server have in common."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from kvanta import _core
from kvanta.engine_options import engine_config
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
    ) -> None:
        """`arguments`: engine options by their own names. `tokenizer`: another folder to take it from."""
        folder = resolve_model(model)
        self.name = folder.name
        config = engine_config(str(folder.path), arguments)
        scheme = arguments.get("kv_cache_dtype")
        self._scheme_file = scheme if is_scheme_file(scheme) else None
        self.tokenizer = Tokenizer(folder.path if tokenizer is None else resolve_model(tokenizer).path)
        self.warnings: list[str] = []
        """What the engine had to say since somebody last looked; it may add more from its own thread."""
        config.set_on_warning(self.warnings.append)
        config.set_fill_masks(fill_masks)
        self.engine = _core.Engine(config)
        self.grammars = GrammarCompiler(self.tokenizer, self.engine.info)

    def stats(self) -> dict[str, Any]:
        """Counters of the engine, with the names of model and cache format."""
        cache = self._scheme_file or self.engine.config.kv_cache_dtype
        return {"model": self.name, "kv_cache_dtype": cache, **self.engine.stats()}
