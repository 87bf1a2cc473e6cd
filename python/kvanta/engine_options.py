"""The one list of engine options: flags of every command, arguments of LLM, fields of the C++ EngineConfig."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvanta import _core
from kvanta.errors import InputError
from kvanta.scheme_file import is_scheme_file, read_scheme_file
from kvanta.values import one_line, truth

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(value: str | int | float) -> int:
    """In bytes: "2GiB", "512 MB" or a plain number."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2].lower() not in _UNITS:
        raise InputError(f"{value!r} is not a size in bytes; examples: 2GiB, 512MiB, 1000000")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size >= 2**62:
        raise InputError(f"{value!r} is more bytes than any machine has")
    return size


def split_list(value: str | int | Iterable[str | int]) -> list[str]:
    """From "0,1,sliding_window", ["0", "1"] or [0, 1]: entries may be separated by commas, by spaces or both."""
    if isinstance(value, (str, int)):
        value = [value]
    return [entry for part in value for entry in str(part).replace(",", " ").split()]


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not re.fullmatch(r"[+-]?[0-9]+", str(value)):
        raise InputError(f"{value!r} is not a whole number")
    return int(value)


def _number(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        raise InputError(f"{value!r} is not a number") from None


@dataclass(frozen=True)
class EngineOption:
    """One option. `field` of EngineConfig is set to convert(value)."""

    name: str
    """As an argument of LLM; the flag is --name with dashes."""
    help: str
    default: Any
    convert: Callable[[Any], Any]
    aliases: tuple[str, ...] = ()
    """Further names, as arguments; also accepted as flags."""
    choices: tuple[str, ...] = ()
    field: str = ""
    is_flag: bool = False
    is_list: bool = False
    metavar: str = "X"

    @property
    def config_field(self) -> str:
        """The field of EngineConfig."""
        return self.field or self.name

    @property
    def flags(self) -> list[str]:
        """As typed on the command line."""
        return [f"--{name.replace('_', '-')}" for name in (self.name, *self.aliases)]

    def read(self, value: Any) -> Any:
        """The value for EngineConfig; raises InputError that names the option."""
        if self.is_flag:
            return truth(self.name, value)
        try:
            converted = self.convert(value)
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from None
        except TypeError:
            raise InputError(f"{self.name} is {one_line(value)}, not {self.metavar}") from None
        if self.choices and converted not in self.choices:
            raise InputError(f"{self.name} is {value!r}; known: {', '.join(self.choices)}")
        return converted


OPTIONS: tuple[EngineOption, ...] = (
    EngineOption(
        "kv_cache_dtype",
        "format of the KV cache: auto, a name of `kvanta formats`, K and V apart (k=int8,v=int4), or a scheme file",
        "auto",
        str,
        metavar="FORMAT",
    ),
    EngineOption(
        "kv_cache_dtype_layers", "formats of single layers, as in '0,1,-1=bf16;2-5=int8'", "", str, metavar="MAP"
    ),
    EngineOption(
        "kv_cache_dtype_skip_layers",
        "layers kept at the model's own precision: numbers, or sliding_window",
        (),
        split_list,
        is_list=True,
        metavar="LAYER",
    ),
    EngineOption("quantization_param_path", "JSON file with the scales of the cache", "", str, metavar="FILE"),
    EngineOption("calculate_kv_scales", "take static scales from the first prompt", False, bool, is_flag=True),
    EngineOption(
        "max_model_len",
        "most tokens of one sequence (default: what the model allows)",
        0,
        _whole,
        ("context_length",),
        metavar="N",
    ),
    EngineOption("max_num_seqs", "most sequences that run at once", 64, _whole, ("max_running_requests",), metavar="N"),
    EngineOption(
        "max_num_batched_tokens",
        "most tokens computed in one step",
        512,
        _whole,
        ("chunked_prefill_size",),
        metavar="N",
    ),
    EngineOption(
        "max_queued_requests",
        "most requests that wait to run; more are refused (0: any number)",
        0,
        _whole,
        metavar="N",
    ),
    EngineOption(
        "block_size",
        "tokens of a cache page: 16, 32, 64 or 128",
        64,
        _whole,
        ("page_size",),
        (),
        "page_size",
        metavar="N",
    ),
    EngineOption(
        "kv_cache_memory_bytes",
        "memory of the cache, as in 2GiB (default: what the sequences can need, at most 40 % of what is free)",
        0,
        parse_bytes,
        metavar="SIZE",
    ),
    EngineOption(
        "enable_prefix_caching",
        "share the cache of common beginnings",
        True,
        bool,
        ("enable_prefix_cache",),
        is_flag=True,
    ),
    EngineOption(
        "dtype",
        "precision of weights and arithmetic",
        "auto",
        str,
        choices=("auto", "bfloat16", "float16", "float32"),
        metavar="DTYPE",
    ),
    EngineOption(
        "weight_dtype",
        "storage of the weights: auto (as dtype), bf16, or blocks of int8 or int4, a GGUF file's own where it has such",
        "auto",
        str,
        choices=("auto", "bf16", "int8", "int4"),
        metavar="DTYPE",
    ),
    EngineOption("device", "where to compute", "auto", str, choices=("auto", "cpu", "cuda"), metavar="DEVICE"),
    EngineOption(
        "enforce_eager",
        "on a GPU: launch every kernel by itself, without CUDA graphs",
        False,
        bool,
        ("disable_cuda_graph",),
        is_flag=True,
    ),
    EngineOption("isa", "CPU instructions: auto, amx, avx512, avx2 or portable", "auto", str, metavar="ISA"),
    EngineOption("threads", "CPU threads (default: every CPU that this process may use)", 0, _whole, metavar="N"),
    EngineOption(
        "quality_sample_rate",
        "share of the served requests, 0 to 1, compared with an exact cache while the engine is idle",
        0.0,
        _number,
        metavar="SHARE",
    ),
    EngineOption("seed", "of requests without a seed of their own", 0, _whole, ("random_seed",), metavar="N"),
)

# Options of the known engines that mean nothing here: accepted, with one line that says so. True: it takes a value.
FOREIGN: Mapping[str, bool] = {
    "trust_remote_code": False,
    "gpu_memory_utilization": True,
    "mem_fraction_static": True,
    "tensor_parallel_size": True,
    "tp_size": True,
    "tp": True,
    "pp": True,
    "dp": True,
    "pipeline_parallel_size": True,
    "data_parallel_size": True,
    "speculative_config": True,
    "speculative_algorithm": True,
    "compilation_config": True,
    "async_scheduling": False,
    "scheduling_policy": True,
    "disable_overlap_schedule": False,
    "enable_mixed_chunk": False,
    "cuda_graph_max_bs": True,
    "num_gpu_blocks_override": True,
    "max_total_tokens": True,
    "max_prefill_tokens": True,
    "dp_size": True,
    "pp_size": True,
    "download_dir": True,
    "swap_space": True,
    "cpu_offload_gb": True,
    "load_format": True,
    "tokenizer_mode": True,
    "attention_backend": True,
    "enable_chunked_prefill": False,
    "no_enable_chunked_prefill": False,
    "disable_log_stats": False,
    "disable_log_requests": False,
    "disable_custom_all_reduce": False,
    "schedule_policy": True,
    "schedule_conservativeness": True,
    "max_parallel_loading_workers": True,
    "distributed_executor_backend": True,
    "enable_torch_compile": False,
    "revision": True,
    "log_level": True,
}
# An option that says the opposite of one of ours.
OPPOSITES: Mapping[str, str] = {"disable_radix_cache": "enable_prefix_caching"}


def foreign_note(name: str) -> str:
    """The line for an option of FOREIGN."""
    if name == "trust_remote_code":
        return "trust_remote_code is accepted, but no code of a model is ever run"
    return f"{name} is accepted for compatibility and does nothing here"


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message: "; did you mean X?", or nothing when nothing is near."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def by_name() -> dict[str, EngineOption]:
    """Every option under its name and its aliases."""
    return {name: option for option in OPTIONS for name in (option.name, *option.aliases)}


def known_arguments(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The arguments under their own names, and notes on those that do nothing. Raises InputError on an unknown one."""
    options = by_name()
    arguments: dict[str, Any] = {}
    notes = []
    for name, value in values.items():
        if name in options:
            target = options[name].name
        elif name in OPPOSITES:
            target, value = OPPOSITES[name], not truth(name, value)  # noqa: PLW2901
        elif name in FOREIGN:
            notes.append(foreign_note(name))
            continue
        else:
            raise InputError(f"unknown engine option {name!r}{nearest(name, [*options, *FOREIGN])}")
        if target in arguments:
            raise InputError(f"the engine option {target!r} is given twice")
        arguments[target] = value
    return arguments, notes


def engine_config(folder: str, arguments: Mapping[str, Any]) -> _core.EngineConfig:
    """The C++ configuration for a model folder; options that are absent or None keep their defaults."""
    config = _core.EngineConfig()
    _set_field(config, "model", "model", folder)
    arguments = _without_scheme_file(folder, arguments)
    for option in OPTIONS:
        value = arguments.get(option.name)
        if value is None:
            value = option.default
        _set_field(config, option.config_field, option.name, option.read(value))
    return config


def _without_scheme_file(folder: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemes of a file in its place."""
    file = arguments.get("kv_cache_dtype")
    if not is_scheme_file(file):
        return arguments
    if arguments.get("kv_cache_dtype_layers"):
        raise InputError(f"the scheme file {file!r} names every layer; kv_cache_dtype_layers cannot be given with it")
    layers = _core.read_model_info(folder, arguments.get("dtype") or "auto").layers
    return {**arguments, "kv_cache_dtype": "bf16", "kv_cache_dtype_layers": read_scheme_file(str(file), layers)}


def _set_field(config: _core.EngineConfig, field: str, name: str, value: Any) -> None:
    try:
        setattr(config, field, value)
    except (TypeError, ValueError, OverflowError):  # the bindings: too large a number, a text that is not UTF-8
        reason = "not valid UTF-8" if isinstance(value, str) else "out of range"
        raise InputError(f"{name} is {one_line(value)}, which is {reason}") from None


def option_names(options: Sequence[EngineOption] = OPTIONS) -> list[str]:
    """The arguments of LLM, for messages and tests."""
    return [option.name for option in options]
