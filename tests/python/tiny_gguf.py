"""Small random models as GGUF files, with the Hugging Face weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass
class TinyModel:
    """Sizes of a model; weights are drawn from `seed` and are exact in bfloat16."""

    architecture: str = "llama"
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 96
    vocab: int = 300
    tied: bool = False
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes[prefix + "self_attn.q_proj.weight"] = (q, hidden)
            shapes[prefix + "self_attn.k_proj.weight"] = (kv, hidden)
            shapes[prefix + "self_attn.v_proj.weight"] = (kv, hidden)
            shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q)
            if self.architecture == "qwen2":
                shapes[prefix + "self_attn.q_proj.bias"] = (q,)
                shapes[prefix + "self_attn.k_proj.bias"] = (kv,)
                shapes[prefix + "self_attn.v_proj.bias"] = (kv,)
            if self.architecture == "qwen3":
                shapes[prefix + "self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[prefix + "self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            shapes[prefix + "mlp.gate_proj.weight"] = (self.ffn, hidden)
            shapes[prefix + "mlp.up_proj.weight"] = (self.ffn, hidden)
            shapes[prefix + "mlp.down_proj.weight"] = (hidden, self.ffn)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, hidden)
        return shapes

    def weights(self) -> Weights:
        rng = np.random.default_rng(self.seed)
        result: Weights = {}
        for name, shape in self.shapes().items():
            values = rng.standard_normal(shape, dtype=np.float32) * (0.1 if "norm" in name else shape[-1] ** -0.5)
            values = values + np.float32(1) if "norm" in name else values
            result[name] = (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return result


def gguf_name(name: str) -> str:
    """llama.cpp's name for a tensor of a Hugging Face checkpoint."""
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, kind = name.rsplit(".", 1)
    if module in top:
        return f"{top[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}.{kind}"


def interleave(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp's order of the rows of q and k."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape).copy()
    )


def byte_vocabulary(count: int) -> tuple[list[str], list[int], list[float]]:
    """A SentencePiece vocabulary: <unk> <s> </s>, the 256 bytes, then single letters."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    types = [2, 3, 3, *([6] * 256), 1]
    while len(tokens) < count:
        tokens.append(chr(ord("A") + len(tokens) - 260))
        types.append(1)
    return tokens, types, [-float(index) for index in range(count)]


def write_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    tokens, types, scores = byte_vocabulary(vocab)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def write_gguf(
    path: Path,
    model: TinyModel,
    weights: Weights,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    encode: Callable[[NDArray[np.float32], gguf.GGMLQuantizationType], NDArray[Any]] = gguf.quantize,
    tokenizer: bool = True,
) -> Path:
    """Writes `weights` (Hugging Face names and order) as llama.cpp's converter would; matrices as `kind`."""
    writer = gguf.GGUFWriter(path, model.architecture)
    writer.add_block_count(model.layers)
    writer.add_context_length(256)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.ffn)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in model.extra.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        (writer.add_float32 if isinstance(value, float) else add)(f"{model.architecture}.{key}", value)
    if tokenizer:
        write_tokenizer(writer, model.vocab)
    for name, values in weights.items():
        stored = values
        if model.architecture == "llama" and "q_proj" in name:
            stored = interleave(values, model.heads)
        if model.architecture == "llama" and "k_proj" in name:
            stored = interleave(values, model.kv_heads)
        if values.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), encode(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rewrite(path: Path, changes: dict[str, Any], tensors: dict[str, Any] | None = None) -> None:
    """Replaces keys and tensors of a GGUF file, None removes one; adds `tensors` of new names."""
    reader = gguf.GGUFReader(path)
    target = path.with_suffix(".new")
    writer = gguf.GGUFWriter(target, changes.get("general.architecture", "llama"))
    values = {
        name: (value.contents(), value.types[0], value.types[-1])
        for name, value in reader.fields.items()
        if not name.startswith("GGUF.") and name != "general.architecture"
    }
    for name, value in changes.items():
        if name == "general.architecture":
            continue
        if value is None:
            del values[name]
            continue
        kind = gguf.GGUFValueType.get_type(value)
        kind = gguf.GGUFValueType.UINT32 if kind == gguf.GGUFValueType.INT32 else kind
        item = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else kind
        values[name] = (value, kind, item)
    for name, (contents, kind, sub) in values.items():
        writer.add_key_value(name, contents, kind, sub_type=sub if kind == gguf.GGUFValueType.ARRAY else None)
    tensors = tensors or {}
    for tensor in reader.tensors:
        if tensor.name not in tensors:
            writer.add_tensor(tensor.name, tensor.data.copy())
    for name, data in tensors.items():
        if data is not None:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.replace(path)
