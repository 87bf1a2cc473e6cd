"""The tensors of a GGUF file under their Hugging Face names: where they are, and their dequantized values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta.errors import InputError
from kvanta.gguf.dense_families import xielu_tensors
from kvanta.gguf.header import TensorInfo
from kvanta.gguf.layer_tables import NORMS_PLUS_ONE, PAIRED_ROPE
from kvanta.gguf.metadata import Metadata, tensor_bytes, type_name
from kvanta.gguf.tensor_names import (
    BLOCK_NAME,
    IGNORED,
    QKV_PARTS,
    modules_of,
    sizes,
    sizes_by_layer,
    top_modules,
)
from kvanta.gguf.tensor_table import Module
from kvanta.terminal.progress import progress_bar

# From here on float32 values round to infinity in bfloat16.
_BFLOAT16_END = float(np.uint32(0x7F7F8000).view(np.float32))
_ELEMENTS = {"F32", "F16", "BF16"}
_SCALED = "NVFP4"
_COMPARED_BYTES = 1 << 20  # at a time


def rotate_halves(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Undoes the row order of GGUF's llama architecture: rope turns rows (2i, 2i+1) there, (i, i + d/2) here."""
    head_dim = rows.shape[0] // heads
    split = rows.reshape(heads, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


@dataclass(frozen=True)
class Weight:
    """A tensor under its Hugging Face name; with "*" in the name, one for each of the first size."""

    name: str
    info: TensorInfo
    shape: tuple[int, ...]
    interleaved_heads: int = 0
    """Heads whose rows are in GGUF's llama order; 0: the order is Hugging Face's."""
    plus_one: bool = False
    """GGUF's values are Hugging Face's plus one."""
    first_row: int = 0
    """The first row of each matrix in the file, or value of a vector, that is one of the weight's."""
    rows_in_file: int = 0
    """Rows of each matrix in the file, where it has others, too; 0: as many as the weight."""
    scale: TensorInfo | None = None
    """Factor of the values (NVFP4): one, or one for each expert."""

    def in_place(self, types: set[str]) -> bool:
        """True if the tensor can be used in its stored form, by a reader of `types`."""
        kind = type_name(self.info)
        is_vector = len(self.shape) == 1 or ("*" in self.name and len(self.shape) == 2)
        return not self.plus_one and self.scale is None and kind in (_ELEMENTS if is_vector else types)

    def tensors(self) -> list[tuple[str, tuple[int, ...], slice]]:
        """The tensors that it stands for: name, shape, rows of the stored matrix."""
        if "*" not in self.name:
            end = self.first_row + self.shape[0]
            return [(self.name, self.shape, slice(self.first_row, end) if self.rows_in_file else slice(None))]
        count, shape = self.shape[0], self.shape[1:]
        rows = math.prod(shape[:-1])
        firsts = [i * (self.rows_in_file or rows) + self.first_row for i in range(count)]
        return [(self.name.replace("*", str(i)), shape, slice(row, row + rows)) for i, row in enumerate(firsts)]

    def entry(self) -> dict[str, Any]:
        """Its place in the file, for the index."""
        is_vector = len(self.info.shape) == 1
        row_bytes = tensor_bytes(self.info) // math.prod(self.info.shape if is_vector else self.info.shape[:-1])
        entry: dict[str, Any] = {
            "offset": self.info.offset + self.first_row * row_bytes,
            "type": type_name(self.info),
            "shape": list(self.shape),
        }
        if self.rows_in_file and "*" in self.name:
            entry["stride"] = self.rows_in_file * row_bytes
        if self.interleaved_heads:
            entry["interleaved_heads"] = self.interleaved_heads
        return entry


class Weights:
    """All weights of a model, checked against the sizes in its config."""

    def __init__(self, metadata: Metadata, config: dict[str, Any]) -> None:
        self.path = metadata.path
        self._metadata = metadata
        self._sizes, self._layer_sizes = sizes(config), sizes_by_layer(config)
        self._layers: int = config["num_hidden_layers"]
        self._own_kv: int = self._layers - config.get("num_kv_shared_layers", 0)
        self._k_eq_v = bool(config.get("attention_k_eq_v"))
        self._layer_types: list[str] = config.get("layer_types") or ["full_attention"] * self._layers
        self._spare: int = config.get("num_nextn_predict_layers") or 0
        self._plus_one = config["model_type"] in NORMS_PLUS_ONE
        self._interleaved_heads: dict[str, int] = {}
        # Granite 4's heads are paired, too, which does not matter without rope.
        if metadata.architecture in PAIRED_ROPE or config["model_type"] == "bamba":
            heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
            self._interleaved_heads = {"attn_q": heads, "attn_k": kv_heads}
        self.from_keys: dict[str, NDArray[np.float32]] = {}
        if config["model_type"] == "apertus":
            self.from_keys = xielu_tensors(metadata, self._layers)
        self._top = top_modules(config["model_type"])
        self._modules = modules_of(config)
        self.weights: dict[str, Weight] = {}
        for info in metadata.tensors.values():
            self.weights |= {weight.name: weight for weight in self._place(info)}
        self._check_complete()
        if any(".k_b_proj." in name for name in self.weights):  # some files have the whole matrix, too
            self.weights = {name: weight for name, weight in self.weights.items() if ".kv_b_proj." not in name}

    def __contains__(self, name: str) -> bool:
        return name in self.weights

    def _place(self, info: TensorInfo) -> list[Weight]:
        """Nothing for tensors that carry no weights of the model's layers."""
        if info.name in IGNORED or info.name.endswith(".input_scale"):  # activations are not quantized
            return []
        block = BLOCK_NAME.fullmatch(info.name)
        if block is None:
            name, _, kind = info.name.rpartition(".")
            module = self._top.get(info.name) or (self._top.get(name) if kind == "weight" else None)
            prefix, own_sizes = "", self._sizes
        else:
            layer, name, kind = int(block[1]), block[2], block[3] or ""
            if self._layers <= layer < self._layers + self._spare:
                return []  # layers that predict several tokens
            if layer >= self._layers:
                raise InputError(
                    f"{self.path}: tensor {info.name!r} does not belong to a model of {self._layers} layers"
                )
            module = self._modules.get(f"{name}.{kind}") or (
                self._modules.get(name) if kind in ("weight", "bias") else None
            )
            prefix, own_sizes = f"model.layers.{layer}.", self._layer_sizes[layer]
        weight = self._metadata.tensors.get(f"{info.name.removesuffix('.scale')}.weight")
        if module is None and kind == "scale" and weight is not None:
            return []  # with its weight
        if module is None or (kind == "bias" and not module.name.startswith("=") and "bias" not in module.words):
            raise InputError(f"{self.path}: GGUF tensor {info.name!r} does not belong to this architecture")
        shape = self._shape(info, module, kind, own_sizes)
        names = [prefix + tensor for tensor in module.tensors(kind)]
        heads, plus_one = self._interleaved_heads.get(name, 0), self._plus_one and "norm" in module.words
        scale = self._scale_of(info)
        if len(names) == 1:
            return [Weight(names[0], info, shape, heads, plus_one, scale=scale)]
        if module.rows:
            counts = [own_sizes[letter] for letter in module.rows]
            firsts = [sum(counts[:i]) for i in range(len(counts))]
            heads_of = [self._interleaved_heads.get(part, 0) for part in QKV_PARTS]
            return [
                Weight(each, info, (count, *shape[1:]), own, first_row=first, rows_in_file=shape[0], scale=scale)
                for each, count, first, own in zip(names, counts, firsts, heads_of, strict=True)
            ]
        rows = shape[1] // len(names)
        part = (shape[0], rows, *shape[2:])
        return [
            Weight(each, info, part, heads, plus_one, first_row=i * rows, rows_in_file=shape[1], scale=scale)
            for i, each in enumerate(names)
        ]

    def _scale_of(self, info: TensorInfo) -> TensorInfo | None:
        """The factor of a weight in NVFP4, in a tensor next to it. Raises InputError for one of another shape."""
        base = info.name.removesuffix(".weight")
        scale = self._metadata.tensors.get(f"{base}.scale") if base != info.name else None
        if scale is None or type_name(info) != _SCALED:
            return None
        count, experts = math.prod(scale.shape), info.shape[0] if len(info.shape) == 3 else 1
        if type_name(scale) != "F32" or count not in (1, experts):
            raise InputError(f"{self.path}: tensor {scale.name!r} has {count} factors for {experts} matrices")
        return scale

    def _shape(self, info: TensorInfo, module: Module, kind: str, own: Mapping[str, int]) -> tuple[int, ...]:
        letters = module.shape[:-1] if kind == "bias" and not module.name.startswith("=") else module.shape
        shape = tuple(own[letter] for letter in letters)
        if info.shape in (shape, tuple(own[letter] for letter in letters if letter != "1")):
            return shape
        if "flat" in module.words and math.prod(info.shape) == math.prod(shape):
            return shape
        raise InputError(f"{self.path}: tensor {info.name!r} has shape {info.shape}, not {shape}")

    def _check_complete(self) -> None:
        required = self._required(self._top.values(), {"optional"})
        for layer in range(self._layers):
            has_experts = f"blk.{layer}.ffn_gate_inp.weight" in self._metadata.tensors
            kinds = {"linear_attention": "recurrent", "conv": "recurrent", "mlp": "mlp", "moe": "moe"}
            kind = kinds.get(self._layer_types[layer], "attention")
            left_out = {"optional", "dense" if has_experts else "moe", "attention", "recurrent", "mlp"} - {kind}
            if layer >= self._own_kv:
                left_out |= {"k", "v"}
            elif self._k_eq_v and self._layer_types[layer] == "full_attention":
                left_out.add("v")
            required += self._required(self._modules.values(), left_out, f"model.layers.{layer}.")
        for name in sorted(set(required) - self.weights.keys()):
            raise InputError(f"{self.path} lacks the tensor for {name!r}")

    def _required(self, modules: Iterable[Module], left_out: set[str], prefix: str = "") -> list[str]:
        """Tensors of the modules without any of the words `left_out`."""
        if self._sizes["p"] == 0:
            left_out = left_out | {"layer_inputs"}
        kept = (module for module in modules if not module.words & left_out)
        return [prefix + tensor for module in kept for tensor in module.tensors("weight")]

    def tied(self) -> bool:
        """True if the output matrix is the embedding: absent, or stored twice."""
        head, embedding = self.weights.get("lm_head.weight"), self.weights["model.embed_tokens.weight"]
        if head is None:
            return True
        if head.info.type_id != embedding.info.type_id:
            return False
        a, b = (self._metadata.data(weight.info).ravel() for weight in (head, embedding))
        return all(
            np.array_equal(a[begin : begin + _COMPARED_BYTES], b[begin : begin + _COMPARED_BYTES])
            for begin in range(0, a.size, _COMPARED_BYTES)
        )

    def shapes(self, names: list[str]) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that the weights `names` stand for, and of those made from keys."""
        shapes = {name: shape for weight in names for name, shape, _ in self.weights[weight].tensors()}
        return shapes | {name: values.shape for name, values in self.from_keys.items()}

    def values(self, names: list[str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """float32 tensors in the order of shapes(), one at a time, with a progress bar."""
        total = sum(tensor_bytes(self.weights[name].info) for name in names)
        with progress_bar(total, f"converting {self.path.name}") as bar:
            for weight in (self.weights[name] for name in names):
                tensors = weight.tensors()
                for name, shape, rows in tensors:
                    yield name, self._values(weight, shape, rows)
                    bar.update(tensor_bytes(weight.info) // len(tensors))
        yield from self.from_keys.items()

    def _values(self, weight: Weight, shape: tuple[int, ...], rows: slice) -> NDArray[np.float32]:
        if len(weight.info.shape) == 1:
            values = self._metadata.values(weight.info).ravel()[rows].reshape(shape)
        else:
            values = self._metadata.values(weight.info, rows).reshape(shape)
        if weight.scale is not None:
            factors = self._metadata.values(weight.scale).ravel()
            stride = weight.rows_in_file or math.prod(shape[:-1])
            values = values * factors[(rows.start or 0) // stride if factors.size > 1 else 0]
        if weight.plus_one:
            values = values - np.float32(1)
        if weight.interleaved_heads:
            values = rotate_halves(values, weight.interleaved_heads)
        if not np.isfinite(values).all():
            raise InputError(f"{self.path}: tensor {weight.info.name!r} has values that are not finite")
        largest = float(np.abs(values).max(initial=0.0))
        if largest >= _BFLOAT16_END:
            raise InputError(f"{self.path}: tensor {weight.info.name!r} has the value {largest:g}, beyond bfloat16")
        return values
