"""GGUF's super-blocks of 256 weights (Q4_K, Q5_K, Q6_K), decoded here value by value from their definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_gguf import TinyModel, interleave, write_gguf

from kvanta import LLM, InputError
from kvanta.files.safetensors_writer import to_bf16
from kvanta.gguf.convert import convert_gguf

KINDS = ("Q4_K", "Q5_K", "Q6_K")
MODEL = TinyModel(layers=1, heads=4, kv_heads=2, head_dim=64, ffn=256)
# Offsets of a super-block's fp16 scales.
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def fp16(block: bytes, at: int) -> np.float32:
    return np.float32(np.frombuffer(block, "<f2", 1, at)[0])


def scale_and_minimum(packed: bytes, index: int) -> tuple[int, int]:
    """Scales of the 8 groups of 32: 6 bits each, in 12 bytes."""
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    high = packed[index + 4]
    return (high & 15) | (packed[index - 4] >> 6 << 4), (high >> 4) | (packed[index] >> 6 << 4)


def q4_or_q5(block: bytes, has_fifth_bit: bool) -> list[np.float32]:
    d, least, packed = fp16(block, 0), fp16(block, 2), block[4:16]
    codes = block[48:] if has_fifth_bit else block[16:]
    values = []
    for i in range(256):
        group, place = divmod(i, 32)
        code = codes[group // 2 * 32 + place] >> (4 * (group % 2)) & 15
        if has_fifth_bit:
            code |= (block[16 + place] >> group & 1) << 4
        scale, minimum = scale_and_minimum(packed, group)
        values.append(d * np.float32(scale) * np.float32(code) - least * np.float32(minimum))
    return values


def q6(block: bytes) -> list[np.float32]:
    d, scales = fp16(block, 208), np.frombuffer(block, np.int8, 16, 192)
    values = []
    for i in range(256):
        half, inside = divmod(i, 128)
        quarter, place = divmod(inside, 32)
        low = block[64 * half + place + 32 * (quarter % 2)] >> (4 * (quarter // 2)) & 15
        high = block[128 + 32 * half + place] >> (2 * quarter) & 3
        values.append(d * np.float32(scales[i // 16]) * np.float32((low | high << 4) - 32))
    return values


def decoded(kind: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = rows.reshape(-1, size)
    values = [q6(block.tobytes()) if kind == "Q6_K" else q4_or_q5(block.tobytes(), kind == "Q5_K") for block in blocks]
    return np.array(values, np.float32).reshape(len(rows), -1)


def bf16_codes(file: Path, name: str) -> NDArray[Any]:
    """A tensor of a safetensors file."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + size])[name]
    assert entry["dtype"] == "BF16"
    begin, end = entry["data_offsets"]
    return np.frombuffer(data[8 + size + begin : 8 + size + end], "<u2").reshape(entry["shape"])


class Encoder:
    """Random super-blocks with scales that are finite; remembers those of each shape's first tensor."""

    def __init__(self, kind: str, scale: float = 1e-3) -> None:
        self._kind, self._scale = kind, scale
        self._random = np.random.default_rng(1)
        self.written: dict[tuple[int, ...], NDArray[np.uint8]] = {}

    def __call__(self, values: NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> NDArray[Any]:
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = self._random.integers(0, 256, (values.size // per_block, size), dtype=np.uint8)
        for at in SCALES[self._kind]:
            scales = (self._random.uniform(0.5, 1, len(blocks)) * self._scale).astype("<f2")
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
        rows = blocks.reshape(values.shape[0], -1)
        self.written.setdefault(values.shape, rows)
        return rows


@pytest.mark.parametrize("kind", KINDS)
def test_super_blocks_are_decoded(kind: str, tmp_path: Path) -> None:
    encode, kind_id = Encoder(kind), gguf.GGMLQuantizationType[kind]
    source = write_gguf(tmp_path / "m.gguf", MODEL, MODEL.weights(), kind=kind_id, encode=encode)
    folder = convert_gguf(source, tmp_path / "out")
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        stored = bf16_codes(folder / "model.safetensors", name)
        rows = encode.written[stored.shape]
        if "q_proj" in name:
            stored = interleave(stored, MODEL.heads)
        for part in (slice(0, 20), slice(-5, None)):
            np.testing.assert_array_equal(stored[part], to_bf16(decoded(kind, rows[part])))
    assert np.isfinite(LLM(folder, weight_dtype="int4", threads=1).logits([1, *range(60, 90)])).all()


def test_a_scale_that_is_not_finite(tmp_path: Path) -> None:
    encode = Encoder("Q4_K", scale=np.inf)
    source = write_gguf(tmp_path / "m.gguf", MODEL, MODEL.weights(), kind=gguf.GGMLQuantizationType.Q4_K, encode=encode)
    with pytest.raises(InputError, match=r"token_embd.weight.*not finite"):
        convert_gguf(source, tmp_path / "out")
