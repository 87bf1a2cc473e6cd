"""An engine's device, its weights and what its cache holds, in one line: for the server's log and repr(llm)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvanta import _core
from kvanta.errors import InputError
from kvanta.formats import RECOMMENDED
from kvanta.terminal.tables import human_bytes

# Without one of these, the cache has what max_num_seqs sequences can need, at most this share of the free memory.
_CACHE_SIZES = ("kv_cache_memory_bytes", "max_total_tokens", "num_gpu_blocks_override")
_SHARE = "40 % of the free memory"


@dataclass(frozen=True)
class EngineSummary:
    """Facts of one engine; of several replicas, of each. Bytes, sequences and tokens are those of `kvanta plan`."""

    backend: str
    """Device and unit: cpu-zen4."""
    threads: int
    processes: int
    """Ranks that compute the model together. Sizes of weights and cache are each one's."""
    replicas: int
    weight_bytes: int
    weights: str
    """Storage of the weights."""
    kv_cache_dtype: str
    cache_bytes: int
    max_model_len: int
    max_num_seqs: int
    sequences: int
    """Sequences of max_model_len tokens that the cache holds, with the exact pages of each."""
    tokens: int
    """Tokens of such sequences, in whole pages, that can run at once."""
    limited: bool
    """True if the free memory decided on the cache's size, which is less than max_num_seqs sequences need."""
    smaller: tuple[str, int] | None
    """The next smaller recommended format, and the sequences that the same memory would hold in it."""
    ram_tokens: int
    """Tokens of copies of pages in RAM, of an engine on a GPU; 0: no tier in RAM."""

    @property
    def all_tokens(self) -> int:
        """Tokens of all replicas: for routers, which divide them as they like."""
        return self.tokens * self.replicas

    def __str__(self) -> str:
        processes = f"{self.processes} processes, each on " if self.processes > 1 else ""
        replicas = f"{self.replicas} replicas, each on " if self.replicas > 1 else ""
        sequences = f"{self.sequences:,} sequence{'s' if self.sequences > 1 else ''} of {self.max_model_len:,} tokens"
        if self.sequences > self.max_num_seqs:
            sequences += f", of which {self.max_num_seqs:,} run at once"
        if self.smaller is not None:
            sequences += f" ({self.smaller[0]} would hold {self.smaller[1]:,})"
        if self.ram_tokens:
            sequences += f", and {self.ram_tokens:,} tokens in RAM"
        size = f"{human_bytes(self.cache_bytes)}{f' ({_SHARE})' if self.limited else ''}"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        weights = f"weights {self.weights}, {human_bytes(self.weight_bytes)}"
        cache = f"cache {self.kv_cache_dtype}, {size}: {sequences}"
        return f"{replicas}{processes}{self.backend}, {threads}; {weights}; {cache}"


def summarize(
    config: _core.EngineConfig, info: _core.ModelInfo, stats: Mapping[str, Any], arguments: Mapping[str, Any]
) -> EngineSummary:
    """`config`: with every "auto" resolved. `stats`: the engine's. `arguments`: those that it was made from."""
    sequence_bytes = _sequence_bytes(config)
    held = config.kv_cache_memory_bytes // sequence_bytes
    pages = config.kv_cache_memory_bytes * config.max_model_len // sequence_bytes // config.page_size
    return EngineSummary(
        backend=stats["backend"],
        threads=stats["threads"],
        processes=_core.rank_count(config),
        replicas=max(1, stats.get("replicas", 1)),  # 0: none has reported yet
        weight_bytes=stats["weight_bytes"],
        weights=stored_as(str(arguments.get("weight_dtype") or "auto"), info.dtype, info.weight_bytes, info.parameters),
        kv_cache_dtype=stats["kv_cache_dtype"],
        cache_bytes=config.kv_cache_memory_bytes,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        sequences=held,
        tokens=min(pages * config.page_size, config.max_num_seqs * config.max_model_len),
        limited=held < config.max_num_seqs and not any(arguments.get(name) for name in _CACHE_SIZES),
        smaller=_next_smaller(config, sequence_bytes),
        ram_tokens=int(stats["host"]["limit_bytes"] / stats["bytes_per_token"]) if stats["host"]["enabled"] else 0,
    )


def stored_as(weight_dtype: str, dtype: str, weight_bytes: int, parameters: int) -> str:
    """Storage of the weights: the option weight_dtype, or what a quantized checkpoint has, or the dtype."""
    if weight_dtype != "auto":
        return weight_dtype
    return "quantized as stored" if weight_bytes < 1.5 * parameters else dtype


def _sequence_bytes(config: _core.EngineConfig) -> int:
    """Bytes of a sequence of max_model_len tokens, with those of a draft model."""
    layout = _core.plan_cache_bytes(config)
    pages = -(-config.max_model_len // config.page_size)
    return layout.sequence_bytes + layout.draft_page_bytes * pages + layout.draft_exact_bytes


def _next_smaller(config: _core.EngineConfig, sequence_bytes: int) -> tuple[str, int] | None:
    other = _core.EngineConfig()
    for name in (each for each in dir(config) if not each.startswith(("_", "set_"))):
        setattr(other, name, getattr(config, name))
    other.kv_cache_dtype_layers, other.kv_cache_dtype_skip_layers = "", []
    bits = _core.plan_cache_bytes(config).bits_per_element
    for each in RECOMMENDED:
        other.kv_cache_dtype = each
        try:
            layout = _core.plan_cache_bytes(other)
        except InputError:  # the layers of this model do not take it
            continue
        if layout.bits_per_element < bits and (needed := _sequence_bytes(other)) < sequence_bytes:
            return each, config.kv_cache_memory_bytes // needed
    return None
