#!/usr/bin/env python3
"""Times of the parts of a layer of DeepSeek V4 on the CPU, by the kind of the layer.

    python benchmarks/deepseek_v4_layers.py --json docs/results/deepseek-v4-layers.json

For each kind (a window alone, entries of 4 tokens that an indexer chooses, entries of 128 tokens) a model of one layer
at the published sizes is written, with random weights as DeepSeek publishes them (FP8, experts in FP4) and fewer
experts, of which a token has as many as published. A prompt fills the context; then decode steps and chunks of a prompt
are timed by the engine's profile. Figures are of the fastest step, since others may use the machine; the memory's limit
is measured after each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from kvanta import _core
from kvanta.checkpoint.resolve import resolve_config
from kvanta.engine.config import engine_config

KINDS = {
    "window": "sliding_attention",
    "entries of 4": "compressed_sparse_attention",
    "entries of 128": "heavily_compressed_attention",
}
VOCABULARY = 4096
CHUNK = 512
"""Tokens of a prompt that are timed."""
PARTS = {
    "experts": ("experts", "linear w1|w3", "linear w2", "linear gate", "activation", "add"),
    "projections": ("linear wq_a", "linear wq_b", "linear wkv", "linear wo_a", "linear wo_b", "rope", "copy"),
    "selection": ("token selection", "linear weights_proj"),
    "attention": ("attention", "attention plan", "append"),
    "entries": ("compressor", "linear wkv|wgate", "linear wkv|wgate|wkv|wgate"),
    "streams": ("hyper-connections", "norm", "linear hc_attn", "linear hc_ffn"),
}
"""Rows of the profile. The indexer's queries are among the projections, whose row has the same name."""
OF_MODEL = ("embed", "linear head", "linear hc_head")
"""Rows that are no layer's."""


def layer_config(kind: str, experts: int, context: int) -> dict[str, Any]:
    """The published configuration of one layer, with other numbers of experts, tokens and positions."""
    config: dict[str, Any] = json.loads((resolve_config("deepseek-v4").path).read_text())
    config |= {"num_hidden_layers": 1, "layer_types": [KINDS[kind]], "num_hash_layers": 0, "n_routed_experts": experts}
    return config | {"vocab_size": VOCABULARY, "max_position_embeddings": context, "expert_dtype": "fp4"}


class _Tensors:
    """Random weights of a model."""

    def __init__(self) -> None:
        self.all: dict[str, torch.Tensor] = {}
        self._random = torch.Generator().manual_seed(5)

    def values(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, deviation: float = 0.02) -> None:
        self.all[name] = (torch.randn(shape, generator=self._random) * deviation).to(dtype)

    def ones(self, name: str, size: int) -> None:
        self.all[name] = torch.ones(size, dtype=torch.bfloat16)

    def fp8(self, module: str, rows: int, columns: int) -> None:
        self.all[f"{module}.weight"] = torch.randn(rows, columns, generator=self._random).to(torch.float8_e4m3fn)
        scales = torch.full((-(-rows // 128), -(-columns // 128)), columns**-0.5)
        self.all[f"{module}.scale"] = torch.exp2(torch.floor(torch.log2(scales))).to(torch.float8_e8m0fnu)

    def fp4(self, module: str, rows: int, columns: int) -> None:
        codes = torch.randint(0, 256, (rows, columns // 2), generator=self._random, dtype=torch.uint8)
        self.all[f"{module}.weight"] = codes.view(torch.int8)
        scales = torch.full((rows, columns // 32), columns**-0.5 / 4)
        self.all[f"{module}.scale"] = torch.exp2(torch.floor(torch.log2(scales))).to(torch.float8_e8m0fnu)


def write_layer(folder: Path, kind: str, config: dict[str, Any]) -> float:
    """Writes a model of one layer. Returns the bytes of weights that it reads for one token."""
    tensors = _Tensors()
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    low, groups, rank = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    streams, inner = config["hc_mult"], config["moe_intermediate_size"]
    for name in ("embed.weight", "head.weight"):
        tensors.values(name, VOCABULARY, hidden, dtype=torch.bfloat16)
    tensors.ones("norm.weight", hidden)

    def connection(name: str, weights: int, scales: int) -> None:
        tensors.values(f"{name}_fn", weights, streams * hidden, deviation=(streams * hidden) ** -0.5)
        tensors.values(f"{name}_base", weights, deviation=1)
        tensors.values(f"{name}_scale", scales, deviation=1)

    connection("hc_head", streams, 1)
    layer = "layers.0."
    for block in ("attn", "ffn"):
        tensors.ones(f"{layer}{block}_norm.weight", hidden)
        connection(f"{layer}hc_{block}", (2 + streams) * streams, 3)
    attention = f"{layer}attn."
    tensors.fp8(attention + "wq_a", low, hidden)
    tensors.fp8(attention + "wq_b", heads * dim, low)
    tensors.fp8(attention + "wkv", dim, hidden)
    tensors.fp8(attention + "wo_a", groups * rank, heads * dim // groups)
    tensors.fp8(attention + "wo_b", hidden, groups * rank)
    tensors.values(attention + "attn_sink", heads, deviation=1)
    tensors.ones(attention + "q_norm.weight", low)
    tensors.ones(attention + "kv_norm.weight", dim)

    def compressor(module: str, channels: int, series: int, tokens: int) -> None:
        for part in ("wkv", "wgate"):
            tensors.values(f"{module}{part}.weight", series * channels, hidden, dtype=torch.bfloat16)
        tensors.values(f"{module}ape", tokens, series * channels)
        tensors.ones(f"{module}norm.weight", channels)

    if kind != "window":
        tokens = config["compress_rates"][KINDS[kind]]
        series = 2 if kind == "entries of 4" else 1
        compressor(attention + "compressor.", dim, series, tokens)
        if series == 2:
            indexer, key_dim = attention + "indexer.", config["index_head_dim"]
            compressor(indexer + "compressor.", key_dim, series, tokens)
            tensors.fp8(indexer + "wq_b", config["index_n_heads"] * key_dim, low)
            tensors.values(indexer + "weights_proj.weight", config["index_n_heads"], hidden, dtype=torch.bfloat16)
    experts = f"{layer}ffn."
    tensors.values(experts + "gate.weight", config["n_routed_experts"], hidden, dtype=torch.bfloat16)
    tensors.values(experts + "gate.bias", config["n_routed_experts"])
    for part, rows, columns in (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner)):
        tensors.fp8(f"{experts}shared_experts.{part}", rows, columns)
        for expert in range(config["n_routed_experts"]):
            tensors.fp4(f"{experts}experts.{expert}.{part}", rows, columns)
    folder.mkdir()
    safetensors.torch.save_file(tensors.all, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return _bytes_read(tensors.all, config)


def _bytes_read(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> float:
    """Bytes of weights that a layer reads for one token."""
    share = config["num_experts_per_tok"] / config["n_routed_experts"]
    return float(
        sum(
            tensor.nbytes * (share if ".experts." in name else 1)
            for name, tensor in tensors.items()
            if name.startswith("layers.")
        )
    )


class Layer:
    """An engine with one layer, and one sequence."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        arguments = {
            "kv_cache_dtype": options.kv_cache_dtype,
            "threads": options.threads,
            "max_num_seqs": 1,
            "max_num_batched_tokens": CHUNK,
            "kv_cache_memory_bytes": "2GiB",
        }
        config = engine_config(str(folder), arguments)
        config.profile = True
        self._engine = _core.Engine(config)
        self._prompt: list[int] = []
        self._random = np.random.default_rng(3)

    def _tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(3, VOCABULARY, count)]

    def _profile(self) -> dict[str, float]:
        return {row["name"]: row["seconds"] for row in self._engine.stats()["profile"]}

    def _steps(self, prompt: list[int], tokens: int) -> Iterator[dict[str, float]]:
        """Profiles of a request's steps, in seconds."""
        params = _core.SamplingParams()
        params.max_tokens, params.temperature, params.ignore_eos = tokens, 0.0, True
        self._engine.add("request", prompt, params)
        before = self._profile()
        while (outputs := self._engine.step()) is not None:
            for each in outputs:
                if each.error:
                    raise SystemExit(f"error: {each.error}")
            after = self._profile()
            yield {name: seconds - before.get(name, 0.0) for name, seconds in after.items() if name not in OF_MODEL}
            before = after

    def measure(self, context: int, repeats: int) -> dict[str, dict[str, float]]:
        """Seconds of a decode step and of a chunk of a prompt after `context` tokens, in the rows of the profile."""
        self._prompt += self._tokens(context - len(self._prompt))
        decode = list(self._steps(self._prompt, repeats + 1))[-repeats:]
        prefill = [list(self._steps([*self._prompt, *self._tokens(CHUNK)], 1))[-1] for _ in range(3)]
        return {
            work: min(steps, key=lambda step: sum(step.values()))
            for work, steps in (("decode", decode), ("prefill", prefill))
        }


def figures(step: dict[str, float]) -> dict[str, Any]:
    """Milliseconds of a step, and the shares of its parts."""
    seconds = sum(step.values())
    known = {name for names in PARTS.values() for name in names}
    if unknown := [name for name, of_row in step.items() if name not in known and of_row > 0]:
        raise AssertionError(f"the profile has {unknown}: add them to PARTS")
    shares = {part: sum(step.get(name, 0.0) for name in names) / seconds for part, names in PARTS.items()}
    return {"ms": 1e3 * seconds, "shares": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768], metavar="TOKENS", help="ascending [32768]")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--experts", type=int, default=8, metavar="N", help="of the layer; a token has 6 [8]")
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="decode steps [30]")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "layer"
            config = layer_config(kind, options.experts, max(options.contexts) + CHUNK + options.repeats + 1)
            weight_bytes = write_layer(folder, kind, config)
            layer = Layer(folder, options)
        for context in options.contexts:
            for work, step in layer.measure(context, options.repeats).items():
                read, _ = _core.linear_limits("fp8", "auto", options.threads)
                row = {"layer": kind, "work": work, "context": context, **figures(step)}
                row["of_memory"] = weight_bytes / (row["ms"] / 1e3) / read if work == "decode" else None
                rows.append(row)
                shares = ", ".join(f"{part} {share:.1%}" for part, share in row["shares"].items())
                print(f"{kind}, {work} after {context} tokens: {row['ms']:.2f} ms: {shares}", flush=True)
    if options.json:
        report = {"kv_cache_dtype": options.kv_cache_dtype, "threads": options.threads, "chunk": CHUNK, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
