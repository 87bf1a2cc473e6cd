"""Damaged and lying GGUF files: one InputError each, quickly, and no files remain."""

import random
import struct
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_gguf import TinyModel, rewrite, write_gguf

from kvanta import LLM, InputError, ResourceError
from kvanta.gguf.convert import convert_gguf, index_gguf

BFLOAT16_MAX = (2 - 2.0**-7) * 2.0**127


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    model = TinyModel(layers=1, head_dim=8, ffn=8)
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", model, model.weights()).read_bytes()


def expect_error(tmp_path: Path, data: bytes, match: str | None = None) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    for make_folder in (convert_gguf, index_gguf):
        with pytest.raises(InputError, match=match) as caught:
            make_folder(path, tmp_path / "out")
        assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


def logits_of(folder: Path) -> NDArray[np.float32]:
    return LLM(folder, kv_cache_memory_bytes="8MiB", max_model_len=64, threads=1).logits([1, 2, 3])


def test_the_good_one_is_good(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(good)
    for make_folder in (convert_gguf, index_gguf):
        assert np.isfinite(logits_of(make_folder(path, tmp_path / make_folder.__name__))).all()


def test_truncated_anywhere(good: bytes, tmp_path: Path) -> None:
    for length in [*range(0, 200, 7), *range(200, len(good) - 1, len(good) // 40), len(good) - 1]:
        expect_error(tmp_path, good[:length])


def test_cut_by_one_byte(good: bytes, tmp_path: Path) -> None:
    expect_error(tmp_path, good[:-1], r"m\.gguf is not a usable GGUF file: its \d+ bytes do not hold what")


def test_other_files(tmp_path: Path) -> None:
    expect_error(tmp_path, b"")
    expect_error(tmp_path, b"PK\x03\x04 a zip file", "does not begin with 'GGUF'")
    expect_error(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer")
    expect_error(tmp_path, b"GGUF" + struct.pack("<I", 1), "version 1")
    expect_error(tmp_path, b"GGUF" + struct.pack(">I", 3), "big-endian GGUF file: convert it")


@pytest.mark.parametrize("count", [2**24 + 1, 2**32, 2**63, 2**64 - 1])
def test_lying_counts(good: bytes, tmp_path: Path, count: int) -> None:
    expect_error(tmp_path, good[:8] + struct.pack("<Q", count) + good[16:])  # tensors
    expect_error(tmp_path, good[:16] + struct.pack("<Q", count) + good[24:])  # keys
    expect_error(tmp_path, good[:24] + struct.pack("<Q", count) + good[32:])  # the first key's length


def test_an_endless_array(tmp_path: Path) -> None:
    # The gguf package would read 2^40 empty elements beyond the end of the file.
    key = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 4, 2**40)
    expect_error(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key)
    key = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 4, 2**22)
    expect_error(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key, "beyond the end")


def test_random_damage_gives_an_error_or_a_model(good: bytes, tmp_path: Path) -> None:
    random_numbers = random.Random(7)
    path = tmp_path / "m.gguf"
    header = 9000  # keys, vocabulary and tensor table
    outcomes: Counter[str] = Counter()
    for case in range(150):
        data = bytearray(good)
        for _ in range(random_numbers.choice([1, 1, 4])):
            data[random_numbers.randrange(min(header, len(data)))] = random_numbers.randrange(256)
        path.write_bytes(data)
        try:  # any other exception fails
            convert_gguf(path, tmp_path / f"out{case}")
            outcomes["converted"] += 1
        except InputError:
            outcomes["not converted"] += 1
        try:
            logits = logits_of(index_gguf(path, tmp_path / f"index{case}"))
        except (InputError, ResourceError):
            outcomes["not loaded"] += 1
        else:
            outcomes["loaded"] += 1
            assert np.isfinite(logits).all()
    for outcome in ("converted", "not converted", "loaded", "not loaded"):
        assert outcomes[outcome] >= 30, outcomes


def test_nan_weights(tmp_path: Path) -> None:
    model = TinyModel()
    weights = model.weights()
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    write_gguf(tmp_path / "m.gguf", model, weights)
    with pytest.raises(InputError, match=r"'blk\.1\.ffn_up\.weight' has values that are not finite"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_weights_beyond_bfloat16(tmp_path: Path) -> None:
    model = TinyModel()
    weights = model.weights()
    matrix = weights["model.layers.1.mlp.up_proj.weight"]
    matrix[3, 4] = -BFLOAT16_MAX
    convert_gguf(write_gguf(tmp_path / "a.gguf", model, weights), tmp_path / "good")
    matrix[3, 4] = -3.4e38
    with pytest.raises(InputError, match=r"'blk\.1\.ffn_up\.weight' has the value 3\.4e\+38, beyond bfloat16"):
        convert_gguf(write_gguf(tmp_path / "b.gguf", model, weights), tmp_path / "out")


@pytest.mark.parametrize("value", [0.0, float("nan"), -1.0])
def test_strange_rope_factors(value: float, tmp_path: Path) -> None:
    model = TinyModel()
    weights = model.weights()
    path = write_gguf(tmp_path / "m.gguf", model, weights)
    rewrite(path, {}, {"rope_freqs.weight": np.full(model.head_dim // 2, value, dtype=np.float32)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match=r"'rope_freqs\.weight' are not those of Llama"):
            convert_gguf(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"attention.head_count": 0}, "head_count"),
        ({"attention.head_count": 3}, "do not fit"),
        ({"attention.head_count_kv": 3}, "do not fit"),
        ({"block_count": 2**30}, "layers in"),
        ({"expert_count": 8}, r"lacks the key 'llama\.expert_used_count'"),
        ({"expert_count": 8, "expert_used_count": 2}, r"'blk\.0\.ffn_gate\.weight' does not belong"),
        ({"rope.scaling.type": "longrope"}, "longrope.*known"),
        ({"rope.dimension_count": 8}, "part of each head"),
        ({"attention.value_length": 8}, "another size"),
        ({"embedding_length": 128}, "shape"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "positive"),
        ({"context_length": "long"}, "whole number"),
        ({"rope.freq_base": 0.5}, r"m\.gguf makes no usable model: config\.json.*rope_theta"),
    ],
)
def test_metadata_that_does_not_fit(extra: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = TinyModel()
    path = write_gguf(tmp_path / "m.gguf", model, model.weights())
    rewrite(path, {f"llama.{key}": value for key, value in extra.items()})
    with pytest.raises(InputError, match=reason) as caught:
        convert_gguf(path, tmp_path / "out")
    assert "m.gguf" in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"general.architecture": "bloom"}, "architecture 'bloom'; known: llama"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer 't5'; known"),
        ({"tokenizer.ggml.eos_token_id": 300}, "outside the vocabulary"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "entries"),
        ({"tokenizer.ggml.scores": [float("nan")] * 300}, r"'tokenizer\.ggml\.scores' has values that are not finite"),
        ({"tokenizer.ggml.tokens": ["a", "b" * 300_000]}, "token 1 has 300000 bytes; at most 4096"),
        ({"tokenizer.ggml.tokens": None}, "lacks the key 'tokenizer.ggml.tokens'"),
    ],
)
def test_tokenizers_that_do_not_fit(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = TinyModel()
    path = write_gguf(tmp_path / "m.gguf", model, model.weights())
    rewrite(path, changes)
    with pytest.raises(InputError, match=reason):
        convert_gguf(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([("a", [32], 0, 0), ("a", [32], 0, 0)], "two of its tensors have the same name"),
        ([("a", [0], 0, 0)], r"tensor 'a' has the shape \[0\]"),
        ([("a", [2**60, 2**60], 0, 0)], "has the shape"),
        ([("a", [32], 4, 0)], "tensor 'a' has the unknown type 4"),
        ([("a", [33, 2], 8, 0)], "tensor 'a' has rows of 33, not whole blocks of 32"),
        ([("a", [32], 0, 2**62)], "do not hold what its header says: 128 bytes of tensor 'a'"),
    ],
)
def test_lying_tables_of_tensors(tensors: list[tuple[str, list[int], int, int]], reason: str, tmp_path: Path) -> None:
    table = b""
    for name, shape, kind, offset in tensors:
        table += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        table += b"".join(struct.pack("<Q", size) for size in shape) + struct.pack("<IQ", kind, offset)
    expect_error(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0) + table + bytes(64), reason)


def test_repeated_keys(tmp_path: Path) -> None:
    key = struct.pack("<Q", 1) + b"a" + struct.pack("<II", 4, 7)
    expect_error(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + key + key, "the key 'a' occurs twice")


def test_a_missing_and_a_strange_tensor(tmp_path: Path) -> None:
    model = TinyModel()
    weights = model.weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(InputError, match=r"lacks the tensor for 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        convert_gguf(write_gguf(tmp_path / "a.gguf", model, weights), tmp_path / "out")
    weights = model.weights()
    weights["model.layers.7.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(InputError, match=r"'blk\.7\.ffn_up\.weight' does not belong"):
        convert_gguf(write_gguf(tmp_path / "b.gguf", model, weights), tmp_path / "out")
