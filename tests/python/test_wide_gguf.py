"""benchmarks/wide_gguf.py: a Llama model with zeros between its channels and heads predicts the same."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import tolerance
from tiny_gguf import TinyModel, write_gguf
from wide_gguf import write_bf16, write_wide

import kvanta

MODEL = TinyModel(heads=3, kv_heads=1, head_dim=64, ffn=256)


def logits(file: Path) -> np.ndarray:
    tokens = np.random.default_rng(7).integers(0, MODEL.vocab, 70).astype(np.int32)
    return kvanta.LLM(file, dtype="float32", kv_cache_dtype="fp32", max_model_len=128).logits(tokens)


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))
    return write_gguf(tmp_path / "plain.gguf", MODEL, MODEL.weights())


def test_a_wide_model_predicts_the_same(plain: Path) -> None:
    wide = plain.with_name("wide.gguf")
    write_wide(plain, wide)
    shapes = {tensor.name: [int(size) for size in tensor.shape] for tensor in gguf.GGUFReader(wide).tensors}
    assert shapes["blk.0.attn_q.weight"] == shapes["blk.0.attn_output.weight"] == [256, 256]
    assert shapes["blk.0.attn_k.weight"] == [256, 64]
    assert shapes["output.weight"] == [256, MODEL.vocab]
    found, expected = logits(wide), logits(plain)
    assert np.abs(found - expected).max() <= tolerance.F32_LOGITS * np.abs(expected).max()


def test_other_sizes_are_refused(plain: Path) -> None:
    other = TinyModel(heads=4, kv_heads=2, head_dim=64)
    file = write_gguf(plain.with_name("other.gguf"), other, other.weights())
    with pytest.raises(SystemExit, match="256 channels, 4 heads and 2 of K"):
        write_wide(file, plain.with_name("wide.gguf"))


def test_bf16_weights_are_those_of_the_blocks(plain: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q4_0
    blocks = write_gguf(plain.with_name("blocks.gguf"), MODEL, MODEL.weights(), kind=kind)
    exact = plain.with_name("exact.gguf")
    write_bf16(blocks, exact)
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(exact).tensors} == {"BF16", "F32"}
    found, expected = logits(exact), logits(blocks)
    # Products of a 16-bit scale and a 4-bit code, rounded to 8 bits.
    assert 0 < np.abs(found - expected).max() <= 2**-8 * 4 * np.abs(expected).max()
