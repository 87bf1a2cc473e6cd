#!/usr/bin/env python3
"""Writes a GGUF file with random weights in the shape and types of a well-known model, to measure speed and memory.

    python benchmarks/random_gguf.py llama-8b Q4_K_M llama-8b.gguf

Shapes: llama-15m, llama-1b, llama-8b, qwen3-30b-a3b, gpt-oss-20b. Types: Q8_0, Q4_0, Q4_K_M (with Q6_K where
llama.cpp has it) and MXFP4 (experts; all else Q8_0). Weights are uniform codes with scales that keep activations in
range, so a forward pass costs what the model's own would; the tokens that it generates mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Types = gguf.GGMLQuantizationType
Array = NDArray[np.uint8] | NDArray[np.float32]
# Byte of each fp16 scale in a block, and its magnitude: weights of about 0.02.
_SCALES = {
    Types.Q8_0: ((0, 3e-4),),
    Types.Q4_0: ((0, 5e-3),),
    Types.Q4_K: ((0, 1e-4), (2, 7e-4)),
    Types.Q6_K: ((208, 2e-5),),
}
_E8M0 = 120  # 2^-7


@dataclass(frozen=True)
class Shape:
    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    theta: float
    experts: int = 0
    experts_used: int = 0
    window: int = 0


SHAPES = {
    "llama-15m": Shape("llama", 8, 384, 1024, 6, 2, 64, 4096, 1e4),
    "llama-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128256, 5e5),
    "llama-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 5e5),
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 768, 32, 4, 128, 151936, 1e6, experts=128, experts_used=8),
    "gpt-oss-20b": Shape("gpt-oss", 24, 2880, 2880, 64, 8, 64, 201088, 1.5e5, experts=32, experts_used=4, window=128),
}


class Writer:
    def __init__(self, path: Path, shape: Shape, kind: str) -> None:
        self._shape, self._kind = shape, kind
        self._random = np.random.default_rng(7)
        self._file = gguf.GGUFWriter(path, shape.architecture)
        self._blocks: dict[Types, NDArray[np.uint8]] = {}
        self._makers: list[Callable[[], Array]] = []

    def write(self) -> None:
        """Writes the file with one tensor at a time in memory."""
        self._metadata()
        self._tokenizer()
        self._tensors()
        self._file.write_header_to_file()
        self._file.write_kv_data_to_file()
        self._file.write_ti_data_to_file()
        for make in self._makers:
            self._file.write_tensor_data(make())
        self._file.close()

    def _metadata(self) -> None:
        shape, file = self._shape, self._file
        file.add_context_length(131072)
        file.add_block_count(shape.layers)
        file.add_embedding_length(shape.hidden)
        file.add_feed_forward_length(shape.ffn)
        file.add_head_count(shape.heads)
        file.add_head_count_kv(shape.kv_heads)
        file.add_key_length(shape.head_dim)
        file.add_value_length(shape.head_dim)
        file.add_rope_freq_base(shape.theta)
        file.add_rope_dimension_count(shape.head_dim)
        file.add_layer_norm_rms_eps(1e-5)
        file.add_vocab_size(shape.vocab)
        if shape.experts:
            file.add_expert_count(shape.experts)
            file.add_expert_used_count(shape.experts_used)
            file.add_expert_feed_forward_length(shape.ffn)
        if shape.window:
            file.add_sliding_window(shape.window)
            file.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            file.add_rope_scaling_factor(32.0)
            file.add_rope_scaling_orig_ctx_len(4096)

    def _tokenizer(self) -> None:
        """A SentencePiece vocabulary: bytes, letters, and tokens that no text has."""
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
        types = [2, 3, 3, *[6] * 256, 1]
        tokens += [f"t{index}" for index in range(len(tokens), self._shape.vocab)]
        types += [1] * (len(tokens) - len(types))
        self._file.add_tokenizer_model("llama")
        self._file.add_tokenizer_pre("default")
        self._file.add_token_list(tokens)
        self._file.add_token_scores([-float(index) for index in range(len(tokens))])
        self._file.add_token_types(types)
        self._file.add_bos_token_id(1)
        self._file.add_eos_token_id(2)
        self._file.add_unk_token_id(0)

    def _random_blocks(self, kind: Types, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Array of `shape`, in bytes."""
        _, size = gguf.GGML_QUANT_SIZES[kind]
        if kind not in self._blocks:  # a few megabytes, repeated
            blocks = self._random.integers(0, 256, (16381, size), dtype=np.uint8)
            for at, magnitude in _SCALES.get(kind, ()):
                scales = self._random.uniform(0.5 * magnitude, magnitude, len(blocks)).astype(np.float16)
                blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
            if kind == Types.MXFP4:
                blocks[:, 0] = _E8M0
            self._blocks[kind] = blocks
        return np.resize(self._blocks[kind], shape)

    def _matrix(self, name: str, kind: Types, *sizes: int) -> None:
        """Tensor of `sizes`, the last one along its rows."""
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*sizes[:-1], sizes[-1] // weights * size)
        self._file.add_tensor_info(name + ".weight", shape, np.dtype(np.uint8), prod(shape), raw_dtype=kind)
        self._makers.append(partial(self._random_blocks, kind, shape))

    def _experts(self, name: str, kind: Types, rows: int, columns: int) -> None:
        self._matrix(name, kind, self._shape.experts, rows, columns)

    def _floats(self, name: str, values: NDArray[np.float32]) -> None:
        self._file.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        self._makers.append(lambda: values)

    def _vector(self, name: str, *sizes: int, value: float = 1.0) -> None:
        self._floats(name, np.full(sizes, value, np.float32))

    def _types(self, layer: int) -> tuple[Types, Types]:
        """Type of a layer's matrices, and of attn_v and ffn_down, which llama.cpp's mix keeps finer in some layers."""
        if self._kind == "MXFP4":
            return Types.Q8_0, Types.Q8_0
        if self._kind != "Q4_K_M":
            kind = Types.__members__[self._kind]
            return kind, kind
        eighth = self._shape.layers // 8
        fine = layer < eighth or layer >= 7 * self._shape.layers // 8 or (layer - eighth) % 3 == 2
        return Types.Q4_K, Types.Q6_K if fine else Types.Q4_K

    def _tensors(self) -> None:
        shape = self._shape
        kind = self._types(0)[0]
        self._matrix("token_embd", kind, shape.vocab, shape.hidden)
        self._vector("output_norm.weight", shape.hidden)
        self._matrix("output", Types.Q6_K if self._kind == "Q4_K_M" else kind, shape.vocab, shape.hidden)
        for layer in range(shape.layers):
            self._layer(f"blk.{layer}.", *self._types(layer))

    def _layer(self, prefix: str, kind: Types, fine: Types) -> None:
        shape = self._shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._vector(prefix + "attn_norm.weight", shape.hidden)
        self._matrix(prefix + "attn_q", kind, q, shape.hidden)
        self._matrix(prefix + "attn_k", kind, kv, shape.hidden)
        self._matrix(prefix + "attn_v", fine, kv, shape.hidden)
        self._matrix(prefix + "attn_output", kind, shape.hidden, q)
        if shape.architecture == "qwen3moe":
            self._vector(prefix + "attn_q_norm.weight", shape.head_dim)
            self._vector(prefix + "attn_k_norm.weight", shape.head_dim)
        if shape.architecture == "gpt-oss":
            self._vector(prefix + "attn_sinks.weight", shape.heads, value=0.5)
            for name, size in (("attn_q", q), ("attn_k", kv), ("attn_v", kv), ("attn_output", shape.hidden)):
                self._vector(f"{prefix}{name}.bias", size, value=0.01)
            self._vector(prefix + "post_attention_norm.weight", shape.hidden)
        else:
            self._vector(prefix + "ffn_norm.weight", shape.hidden)
        if not shape.experts:
            self._matrix(prefix + "ffn_gate", kind, shape.ffn, shape.hidden)
            self._matrix(prefix + "ffn_up", kind, shape.ffn, shape.hidden)
            self._matrix(prefix + "ffn_down", fine, shape.hidden, shape.ffn)
            return
        router = self._random.normal(0, 0.02, (shape.experts, shape.hidden)).astype(np.float32)
        self._floats(prefix + "ffn_gate_inp.weight", router)
        if self._kind == "MXFP4":
            kind = fine = Types.MXFP4
        self._experts(prefix + "ffn_gate_exps", kind, shape.ffn, shape.hidden)
        self._experts(prefix + "ffn_up_exps", kind, shape.ffn, shape.hidden)
        self._experts(prefix + "ffn_down_exps", fine, shape.hidden, shape.ffn)
        if shape.architecture == "gpt-oss":
            self._vector(prefix + "ffn_gate_inp.bias", shape.experts, value=0.0)
            for name, size in (("gate", shape.ffn), ("up", shape.ffn), ("down", shape.hidden)):
                self._vector(f"{prefix}ffn_{name}_exps.bias", shape.experts, size, value=0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("type", choices=("Q8_0", "Q4_0", "Q4_K_M", "MXFP4"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, help="fewer or more than the model has, to measure what a layer costs")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    if options.layers is not None:
        shape = replace(shape, layers=options.layers)
    Writer(options.file, shape, options.type).write()


if __name__ == "__main__":
    main()
