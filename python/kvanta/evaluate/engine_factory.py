"""The model that is evaluated: how its engines are made, and what identifies their results."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvanta import _core, attention, formats
from kvanta.checkpoint.resolve import resolve_model
from kvanta.engine.config import engine_config
from kvanta.errors import InputError
from kvanta.llm import LLM
from kvanta.options.scheme_file import is_scheme_file
from kvanta.text.tokenizer import Tokenizer

_NUMERIC = ("dtype", "weight_dtype", "quantization_param_path", "calculate_kv_scales", "device", "isa")
_BF16_BITS = 16


@dataclass(frozen=True)
class EngineFactory:
    """A model folder, the engine options that all formats share, and the longest passage."""

    model: str
    """MODEL as the user gave it."""
    folder: Path
    context: int
    """Tokens."""
    sequences: int
    """Number of sequences that an engine runs at once."""
    options: Mapping[str, Any] = field(default_factory=dict)
    reference_weights: str | None = None
    """weight_dtype of the reference; None: that of the options."""

    @staticmethod
    def find(
        model: str,
        context: int | None,
        sequences: int,
        options: Mapping[str, Any],
        reference_weights: str | None = None,
    ) -> EngineFactory:
        """`context`: default 2048 or the model's limit. Raises InputError."""
        folder = resolve_model(model)
        limit = int(_core.read_model_info(str(folder.path), options.get("dtype") or "auto").max_position)
        if context is None:
            context = min(2048, limit)
        if not 0 < context <= limit:
            raise InputError(f"context must be in 1..{limit}, the limit of {folder.name!r}, got {context}")
        return EngineFactory(folder.name, folder.path, context, sequences, dict(options), reference_weights)

    def _arguments(self, scheme: str, layers: str) -> dict[str, Any]:
        fixed = {"kv_cache_dtype": scheme, "max_model_len": self.context, "enable_prefix_caching": True}
        if layers:
            fixed["kv_cache_dtype_layers"] = layers
        return {"max_num_seqs": self.sequences, **self.options, **fixed}

    def engine(self, scheme: str, layers: str = "") -> tuple[LLM, list[str]]:
        """An engine on that cache, and what it warns of."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            llm = LLM(self.folder, **self._arguments(scheme, layers))
        return llm, [str(each.message) for each in caught]

    def reference_engine(self, scheme: str) -> LLM:
        """An engine on that cache in every layer and at every age, whose states are never rounded."""
        return self.of_reference().engine(scheme)[0]

    def of_reference(self) -> EngineFactory:
        """The factory of such engines."""
        layers = ("kv_cache_dtype_layers", "kv_cache_dtype_skip_layers")
        quantized = (*layers, "kv_cache_ages", "kv_cache_floor", "state_cache_dtype")
        exact = {name: value for name, value in self._reference_options().items() if name not in quantized}
        return replace(self, options=exact)

    def _reference_options(self) -> dict[str, Any]:
        changed = {} if self.reference_weights is None else {"weight_dtype": self.reference_weights}
        return {**self.options, **changed}

    def plan(self, scheme: str, layers: str = "") -> _core.CachePlan:
        """Bytes of that cache, without an engine. Raises InputError if the model cannot take it."""
        return _core.plan_cache_bytes(engine_config(str(self.folder), self._arguments(scheme, layers)))

    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return Tokenizer(self.folder)

    def info(self) -> _core.ModelInfo:
        """Sizes of the model."""
        return _core.read_model_info(str(self.folder), self.options.get("dtype") or "auto")

    def usable_formats(self, names: Sequence[str] | None, *, recommended: bool = False) -> list[str]:
        """`names`, each of which the model must take, or all quantized formats that it and the device take.

        `recommended`: of these, the recommended ones, if the model takes any.
        """
        if names is not None:
            for name in names:
                self.plan(name)
            return list(dict.fromkeys(names))
        usable = self._taken(formats.RECOMMENDED) if recommended else []
        if not usable:
            usable = self._taken([str(row["name"]) for row in formats.table() if row["code_bits"] < 16])
        if not usable:
            raise InputError(f"no quantized cache format fits the heads of {self.model!r}")
        return usable

    def _taken(self, names: Sequence[str]) -> list[str]:
        gpu = any(backend.startswith("cuda") for backend in attention.backends())
        device = {"cpu": "cpu", "cuda": "cuda"}.get(str(self.options.get("device")), "cuda" if gpu else "cpu")
        devices = {str(row["name"]): row["backends"] for row in formats.table()}
        taken = []
        for name in names:
            try:
                bits = self.plan(name).bits_per_element
            except InputError:
                continue  # layers that this format does not take
            if bits > _BF16_BITS:
                continue  # heads so small that the padding of their rows costs more than the codes save
            if device in devices.get(name.partition("+")[0], [device]):
                taken.append(name)
        return taken

    def options_identity(self) -> dict[str, Any]:
        """The options of the engines that are compared with a reference, as far as their results depend on them."""
        return _numeric_options(self.options)

    def identity(self, scheme: str) -> dict[str, Any]:
        """All that the reference on `scheme` depends on but the tokens: files, precision, and this very library."""
        weights = sorted(path for path in self.folder.iterdir() if path.suffix in (".json", ".safetensors"))
        scales = self.options.get("quantization_param_path")
        if scales and Path(scales).is_file():
            weights.append(Path(scales))
        library = Path(_core.__file__).stat()
        return {
            "files": [_identity_of(path) for path in weights],
            "scheme": scheme,
            "scheme_file": _identity_of(Path(scheme)) if is_scheme_file(scheme) else None,
            "options": _numeric_options(self._reference_options()),
            "page_size": engine_config(str(self.folder), self.of_reference().options).page_size,
            "unit": _core.selected_isa("auto"),
            "version": [_core.version(), library.st_size, library.st_mtime_ns],
        }


def _numeric_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The given options on which the bits of results depend."""
    return {name: options[name] for name in _NUMERIC if options.get(name) is not None}


def _identity_of(file: Path) -> list[Any]:
    return [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]
