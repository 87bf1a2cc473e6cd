"""The tensors of a GGUF file under their Hugging Face names, dequantized, in the Hugging Face order of rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from kvanta.errors import InputError
from kvanta.gguf_convert.metadata import Metadata
from kvanta.progress import progress_bar

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# From here on float32 values round to infinity in bfloat16.
_BFLOAT16_END = float(np.uint32(0x7F7F8000).view(np.float32))
# Formats that linear layers keep (docs/weights.md): blocks of 32 along a row, of this many bytes.
_BLOCK_BYTES = {
    kind: gguf.GGML_QUANT_SIZES[kind][1]
    for kind in (
        gguf.GGMLQuantizationType.Q8_0,
        gguf.GGMLQuantizationType.Q4_0,
        gguf.GGMLQuantizationType.Q4_1,
    )
}
_BLOCK_WEIGHTS = 32
_IGNORED = {"rope_freqs.weight"}  # read by config.py: Llama 3's rope scaling


def hugging_face_name(name: str) -> str | None:
    """None for tensors that carry no weights."""
    if name in _IGNORED:
        return None
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block is None or block[2] not in _BLOCK_NAMES:
        raise InputError(f"GGUF tensor {name!r} has no place in a supported architecture")
    return f"model.layers.{int(block[1])}.{_BLOCK_NAMES[block[2]]}.{block[3]}"


def rotate_halves(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Undoes the row order of GGUF's llama architecture: rope turns rows (2i, 2i+1) there, (i, i + d/2) here."""
    head_dim = rows.shape[0] // heads
    split = rows.reshape(heads, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


class Weights:
    """All tensors: shapes at once, values one at a time."""

    def __init__(self, metadata: Metadata, config: dict[str, Any]) -> None:
        self.path = metadata.path
        self._tensors: dict[str, Any] = {}
        for tensor in metadata.reader.tensors:
            name = hugging_face_name(tensor.name)
            if name is not None:
                self._tensors[name] = tensor
        self._heads: dict[str, int] = {}
        if metadata.architecture == "llama":
            self._heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        self._check_shapes(config)
        self.shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def _check_shapes(self, config: dict[str, Any]) -> None:
        hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        q = config["num_attention_heads"] * config["head_dim"]
        kv = config["num_key_value_heads"] * config["head_dim"]
        head_dim = config["head_dim"]
        expected: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (vocab, hidden),
            "model.norm.weight": (hidden,),
            "lm_head.weight": (vocab, hidden),
        }
        required = {"model.embed_tokens.weight", "model.norm.weight"}
        layer_shapes = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
        }
        optional = {
            "self_attn.q_proj.bias": (q,),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.bias": (kv,),
            "self_attn.o_proj.bias": (hidden,),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.k_norm.weight": (head_dim,),
        }
        if config["num_hidden_layers"] > len(self._tensors):
            raise InputError(f"{self.path} says {config['num_hidden_layers']} layers in {len(self._tensors)} tensors")
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            required.update(prefix + name for name in layer_shapes)
            expected.update({prefix + name: shape for name, shape in (layer_shapes | optional).items()})
        for name in sorted(required - self._tensors.keys()):
            raise InputError(f"{self.path} lacks the tensor for {name!r}")
        for name, tensor in self._tensors.items():
            shape = tuple(int(n) for n in reversed(tensor.shape))
            if name not in expected:
                raise InputError(f"{self.path}: tensor {tensor.name!r} does not belong to this architecture")
            if shape != expected[name]:
                raise InputError(f"{self.path}: tensor {tensor.name!r} has shape {shape}, not {expected[name]}")

    def tied(self) -> bool:
        """True if the output matrix is the embedding: absent, or stored twice."""
        head, embedding = self._tensors.get("lm_head.weight"), self._tensors["model.embed_tokens.weight"]
        if head is None:
            return True
        return head.tensor_type == embedding.tensor_type and np.array_equal(head.data, embedding.data)

    def block_shapes(self, names: list[str]) -> dict[str, tuple[int, ...]]:
        """The tensors among `names` whose blocks linear layers keep: (rows, blocks of a row, bytes of a block)."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            size = _BLOCK_BYTES.get(self._tensors[name].tensor_type)
            if size is not None and len(self.shapes[name]) == 2:
                rows, columns = self.shapes[name]
                shapes[name] = (rows, columns // _BLOCK_WEIGHTS, size)
        return shapes

    def blocks(self, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """The tensors of block_shapes() as the file has them, but for the order of rows."""
        for name, shape in shapes.items():
            blocks = np.asarray(self._tensors[name].data).view(np.uint8).reshape(shape)
            yield name, self._in_order(name, blocks)

    def _in_order(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        module = name.split(".")[-2]
        return rotate_halves(rows, self._heads[module]) if module in self._heads else rows

    def values(self, names: list[str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """float32 tensors, one at a time, with a progress bar."""
        total = sum(int(self._tensors[name].n_bytes) for name in names)
        with progress_bar(total, f"converting {self.path.name}") as bar:
            for name in names:
                tensor = self._tensors[name]
                try:
                    with np.errstate(all="ignore"):  # what is not finite is refused below
                        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
                    values = values.reshape(self.shapes[name])
                except NotImplementedError:
                    raise InputError(
                        f"{self.path}: tensor {tensor.name!r} is {tensor.tensor_type.name}, which cannot be dequantized"
                    ) from None
                except ValueError:
                    raise InputError(f"{self.path}: tensor {tensor.name!r} does not have its shape's bytes") from None
                values = self._in_order(name, values)
                if not np.isfinite(values).all():
                    raise InputError(f"{self.path}: tensor {tensor.name!r} has values that are not finite")
                largest = float(max(values.max(), -values.min()))
                if largest >= _BFLOAT16_END:
                    raise InputError(f"{self.path}: tensor {tensor.name!r} has the value {largest:g}, beyond bfloat16")
                yield name, values
                bar.update(int(tensor.n_bytes))
