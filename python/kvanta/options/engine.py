"""Engine options: one dataclass gives the arguments of LLM, the flags of every command and the C++ EngineConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvanta.errors import InputError
from kvanta.options.batching import BatchingOptions
from kvanta.options.option import (
    EVERYWHERE,
    GENERATING,
    Option,
    json_text,
    option,
    parse_bytes,
    parse_integer,
    parse_number,
    parse_tokens,
    split_list,
)

ROLES = ("both", "prefill", "decode")
_DTYPES = ("auto", "bfloat16", "float16", "float32")
_DTYPE_NAMES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}


def _dtype(value: Any) -> str:
    name = str(value)
    return _DTYPE_NAMES.get(name.lower(), name)


def _state_dtype(value: Any) -> str:
    """VLLM and SGLang have auto for the model's own, which is float32."""
    return "float32" if str(value).lower() == "auto" else _dtype(value)


def _method(value: Any) -> str:
    """SGLang writes methods in capitals, and calls a draft model STANDALONE and MTP NEXTN, or EAGLE without a model."""
    name = str(value).lower()
    return {"none": "", "standalone": "draft_model", "nextn": "mtp", "eagle": "mtp"}.get(name, name)


def _store_url(value: Any) -> str:
    """Checked here, because it may have a password, which no message may show."""
    url = str(value)
    if not url.isprintable():
        raise InputError("a URL has no control characters or surrogates")
    return url


def _parse_seed(value: Any) -> int:
    seed = parse_integer(value)
    if not 0 <= seed < 2**64:
        raise InputError(f"{seed} is not in 0..{2**64 - 1}")
    return seed


def _role(value: Any) -> str:
    """SGLang has null for both."""
    name = str(value).lower()
    return "both" if name == "null" else name


@dataclass
class EngineOptions(BatchingOptions):
    """Every engine option. To add one: a field here or in a base class, and its meaning in the C++ EngineConfig."""

    kv_cache_dtype: str = option(
        "auto",
        "format of the KV cache: auto, a name of `kvanta formats`, K and V apart (k=int8,v=int4), or a scheme file",
        metavar="FORMAT",
        group="cache",
        shown=EVERYWHERE,
    )
    kv_cache_ages: str = option(
        "",
        "precision by age, in place of --kv-cache-dtype: formats of pages by their distance from a query in tokens, as "
        "in 0=int8,8192=int4,32768=t3",
        config_field="kv_cache_dtype",
        metavar="MAP",
        group="cache",
    )
    kv_cache_floor: str = option(
        "",
        "precision by pressure: the format, or two, to which pages of --kv-cache-dtype are demoted where memory is "
        "short, as in t3 or int4,t2",
        config_field="kv_cache_dtype",
        metavar="FORMAT",
        group="cache",
    )
    kv_cache_dtype_layers: str = option(
        "", "formats of single layers, as in '0,1,-1=bf16;2-5=int8'", metavar="MAP", group="cache"
    )
    kv_cache_dtype_skip_layers: Sequence[str | int] | str = option(
        (),
        "layers kept at the model's own precision: numbers, or sliding_window",
        split_list,
        is_list=True,
        metavar="LAYER",
        group="cache",
    )
    quantization_param_path: str = option("", "file with scales, or matrices of +query", metavar="FILE", group="cache")
    calculate_kv_scales: bool = option(False, "measure static scales when the model is loaded", group="cache")
    indexer_cache_dtype: str = option(
        "auto",
        "keys of indexers, which select the tokens of sparse attention (DeepSeek V3.2 and V4, GLM-5): auto "
        "(unquantized where latents are, else fp8), fp8, int8, int4, nvfp4, bf16, fp16, fp32",
        metavar="FORMAT",
        group="cache",
    )
    state_cache_dtype: str = option(
        "float32",
        "states of recurrent layers, rounded so at every --state-grid tokens, where prefix hits continue: float32 "
        "(never rounded), bfloat16, int8, int4",
        _state_dtype,
        aliases=("mamba_ssm_cache_dtype", "mamba_ssm_dtype"),
        metavar="TYPE",
        group="cache",
    )
    state_grid: int = option(
        1024,
        "tokens between the positions at which states are rounded; a multiple of --block-size",
        parse_integer,
        metavar="N",
        group="cache",
    )
    block_size: int | None = option(
        64,
        "tokens of a cache page: 16, 32, 64 or 128",
        parse_integer,
        aliases=("page_size",),
        config_field="page_size",
        metavar="N",
        group="cache",
    )
    kv_cache_memory_bytes: int | str | None = option(
        0,
        "memory of the cache, as in 2GiB (default: what the sequences can need, at most 40 % of the free memory)",
        parse_bytes,
        metavar="SIZE",
        group="cache",
        shown=GENERATING,
    )
    max_total_tokens: int | None = option(
        0,
        "size of the cache in tokens, in place of its bytes; whole pages count",
        parse_tokens,
        config_field="kv_cache_memory_bytes",
        metavar="N",
        group="cache",
    )
    num_gpu_blocks_override: int | None = option(
        0,
        "size of the cache in pages of block_size tokens",
        parse_integer,
        config_field="kv_cache_memory_bytes",
        metavar="N",
        group="cache",
    )
    speculative_config: Mapping[str, Any] | str | None = option(
        "",
        'speculative decoding: JSON as {"method": "ngram"}, {"method": "mtp"} or {"model": "SMALL_MODEL"}; keys: '
        "docs/speculation.md",
        json_text,
        metavar="JSON",
        short_flag="-sc",
        group="speculation",
    )
    speculative_algorithm: str | None = option(
        "",
        "its method alone: ngram, mtp (NEXTN), draft_model (STANDALONE)",
        _method,
        aliases=("spec_method",),
        config_field="speculative_config",
        metavar="METHOD",
        group="speculation",
    )
    speculative_draft_model_path: str | None = option(
        "",
        "its draft model: what MODEL may be, with the same tokenizer",
        aliases=("speculative_draft_model", "spec_model"),
        config_field="speculative_config",
        metavar="MODEL",
        group="speculation",
    )
    speculative_draft_kv_cache_dtype: str | None = option(
        "",
        "format of the draft model's cache: int8",
        config_field="speculative_config",
        metavar="FORMAT",
        group="speculation",
    )
    speculative_num_draft_tokens: int | None = option(
        0,
        "its maximum draft tokens of a sequence and step",
        parse_integer,
        aliases=("spec_tokens",),
        config_field="speculative_config",
        metavar="N",
        group="speculation",
    )
    enable_prefix_caching: bool | None = option(
        True, "share the cache of common prefixes", aliases=("enable_prefix_cache",), group="prefix"
    )
    kv_offload_bytes: int | str | None = option(
        0,
        "with --device cuda: page-locked RAM that keeps copies of pages for when the GPU's memory is full, as in 64GiB",
        parse_bytes,
        metavar="SIZE",
        group="prefix",
    )
    kv_cache_dir: str = option(
        "",
        "folder in which cached prefixes outlive the process; several processes may share it",
        metavar="DIR",
        group="prefix",
    )
    kv_cache_dir_bytes: int | str | None = option(
        16 << 30,
        "limit of the files of kv_cache_dir; the least recently used are removed first",
        parse_bytes,
        metavar="SIZE",
        group="prefix",
    )
    kv_store: str = option(
        "",
        "server in which several machines share cached prefixes: redis[s]://[[user]:password@]host[:port][/database]",
        _store_url,
        metavar="URL",
        group="prefix",
    )
    kv_store_ttl: int | None = option(
        0,
        "seconds that kv_store keeps pages after their last use (default, 0: until it evicts them)",
        parse_integer,
        metavar="SECONDS",
        group="prefix",
    )
    role: str = option(
        "both",
        "prefill: requests end with their first token, when their prompt's pages are in kv_store; decode: stored pages "
        "are loaded, whatever computing them would cost; both",
        _role,
        aliases=("disaggregation_mode",),
        choices=ROLES,
        metavar="ROLE",
        group="parallel",
    )
    max_cache_ttl: float | None = option(
        0.0,
        "limit of a request's cache_ttl, for which its prefix stays cached, in seconds (0: none may have one)",
        parse_number,
        metavar="SECONDS",
        group="prefix",
    )
    dtype: str = option(
        "auto", "precision of weights and arithmetic", _dtype, choices=_DTYPES, metavar="DTYPE", group="model"
    )
    weight_dtype: str = option(
        "auto",
        "storage of the weights: auto (as dtype; a GGUF file's own), bf16, or blocks of int8 or int4",
        choices=("auto", "bf16", "int8", "int4"),
        metavar="DTYPE",
        group="model",
        shown=EVERYWHERE,
    )
    device: str = option(
        "auto",
        "device that computes",
        choices=("auto", "cpu", "cuda"),
        metavar="DEVICE",
        group="device",
        shown=EVERYWHERE,
    )
    enforce_eager: bool = option(
        False,
        "on a GPU: launch every kernel by itself, without CUDA graphs",
        aliases=("disable_cuda_graph",),
        group="device",
    )
    isa: str = option(
        "auto",
        "CPU instruction set: auto, or a unit of docs/support.md such as avx2 or neon",
        metavar="ISA",
        group="device",
    )
    threads: int | None = option(
        0,
        "CPU threads (default: the CPUs of its affinity mask and cgroup)",
        parse_integer,
        metavar="N",
        group="device",
        shown=EVERYWHERE,
    )
    tensor_parallel_size: int | None = option(
        1,
        "processes that compute the model together, each with a part of every layer's weights and cache; "
        "kv_cache_memory_bytes and threads are each one's (docs/parallel.md)",
        parse_integer,
        aliases=("tp_size", "tp"),
        metavar="N",
        short_flag="-tp",
        group="parallel",
        shown=("serve",),
    )
    pipeline_parallel_size: int | None = option(
        1,
        "processes that each have some of the layers, and work on as many batches at once",
        parse_integer,
        aliases=("pp_size", "pp"),
        metavar="N",
        short_flag="-pp",
        group="parallel",
    )
    decode_context_parallel_size: int | None = option(
        1,
        "divide latents (MLA), or compressed entries, among the processes of tensor_parallel_size, by pages, instead "
        "of keeping them whole in each: 1 or that number, 2 or 4",
        parse_integer,
        aliases=("dcp_size", "dcp"),
        metavar="N",
        short_flag="-dcp",
        group="parallel",
    )
    enable_expert_parallel: bool = option(
        False,
        "divide the experts of a layer among these processes, instead of each expert",
        short_flag="-ep",
        group="parallel",
    )
    distributed_timeout_seconds: int | None = option(
        120,
        "seconds after which one of these processes that does not answer is considered lost",
        parse_integer,
        aliases=("dist_timeout",),
        metavar="SECONDS",
        group="parallel",
    )
    nnodes: int | None = option(
        1,
        "machines that these processes are divided among; each runs the same command with its own node_rank",
        parse_integer,
        metavar="N",
        short_flag="-n",
        group="parallel",
    )
    node_rank: int | None = option(
        0,
        "number of this machine: 0 has the front, the others only compute",
        parse_integer,
        metavar="N",
        short_flag="-r",
        group="parallel",
    )
    master_addr: str | None = option(
        "127.0.0.1",
        "address of machine 0, or ADDRESS:PORT",
        aliases=("dist_init_addr",),
        metavar="ADDRESS",
        group="parallel",
    )
    master_port: int | None = option(
        29501, "port at which machine 0 waits for the others", parse_integer, metavar="PORT", group="parallel"
    )
    quality_sample_rate: float | None = option(
        0.0,
        "share of the served requests, 0 to 1, compared with an exact cache while the engine is idle",
        parse_number,
        metavar="SHARE",
        group="cache",
    )
    seed: int | None = option(
        0,
        "seed of sampling, for requests that give none",
        _parse_seed,
        aliases=("random_seed",),
        metavar="N",
        group="sampling",
        shown=("generate", "chat"),
    )


OPTIONS: tuple[Option, ...] = EngineOptions.options()


def by_name() -> dict[str, Option]:
    """Every option under its name and its aliases."""
    return {name: each for each in OPTIONS for name in each.names}
