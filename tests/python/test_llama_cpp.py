"""benchmarks/llama_cpp.py, without its program: what it reads from it, the model it writes for it, the verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import exact_gguf
import llama_cpp
import numpy as np
import pytest
from peer_rows import compare
from tiny_gguf import TinyModel, write_gguf

from kvanta.evaluate.passages import Passage
from kvanta.gguf.convert import convert_gguf
from kvanta.gguf.tokenizer import byte_level_bpe

OUTPUT = (Path(__file__).parents[1] / "data" / "llama_cpp" / "kl_divergence.txt").read_text(encoding="utf-8")
"""Output of llama-perplexity --kl-divergence, from the first figure on."""


def test_figures_of_the_real_output() -> None:
    assert llama_cpp.parse_figures(OUTPUT) == {
        "kl_mean": 0.00039,
        "kl_mean_error": 7e-06,
        "kl_median": 0.000233,
        "kl_p99": 0.002944,
        "kl_max": 0.017292,
        "top1": 0.98803,
        "top1_error": 0.0012,
        "ppl": 17.449051,
        "ppl_ratio": 1.000992,
    }


@pytest.mark.parametrize("line", ["Mean    KLD", "Same top p", "99.0%   KLD"])
def test_a_figure_that_is_missing_or_not_finite(line: str) -> None:
    (whole,) = (each for each in OUTPUT.splitlines() if each.startswith(line))
    with pytest.raises(SystemExit, match="said no"):
        llama_cpp.parse_figures(OUTPUT.replace(whole, ""))
    with pytest.raises(SystemExit, match="said no"):
        llama_cpp.parse_figures(OUTPUT.replace(whole, f"{line}: nan ± nan %"))


def test_version() -> None:
    assert llama_cpp.parse_version("load: x\nversion: 6123 (abcdef1)\nbuilt with cc\n") == "6123 (abcdef1)"
    assert llama_cpp.parse_version("") == "unknown"


def test_bits() -> None:
    bits = {name: llama_cpp.bits_per_element(name) for name in llama_cpp.FORMATS}
    assert bits == {"q8_0": 8.5, "q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0, "q4_0": 4.5, "iq4_nl": 4.5}


def base_file(path: Path, context: int, tokens: list[int]) -> Path:
    numbers = np.array([context, 300, len(tokens) // context, *tokens], dtype="<i4")
    path.write_bytes(b"_logits_" + numbers.tobytes() + b"predictions")
    return path


def test_windows_must_be_the_same(tmp_path: Path) -> None:
    passages = [Passage((1, 2, 3, 4), 1), Passage((5, 6, 7, 8), 1)]
    llama_cpp.check_windows(base_file(tmp_path / "a", 4, [1, 2, 3, 4, 5, 6, 7, 8]), passages)
    with pytest.raises(SystemExit, match="differ from token 4 on"):
        llama_cpp.check_windows(base_file(tmp_path / "b", 4, [1, 2, 3, 4, 0, 6, 7, 8]), passages)
    with pytest.raises(SystemExit, match="reads 4 tokens, Kvanta 8"):
        llama_cpp.check_windows(base_file(tmp_path / "c", 4, [1, 2, 3, 4]), passages)
    for content in (b"something else", b"_logits_\x04\0\0\0"):
        (tmp_path / "d").write_bytes(content)
        with pytest.raises(SystemExit, match="is no file of"):
            llama_cpp.check_windows(tmp_path / "d", passages)


def byte_level_folder(tmp_path: Path, model: TinyModel) -> Path:
    """A tiny model with a byte-level tokenizer: single letters, a pair of them, and an end."""
    folder = convert_gguf(write_gguf(tmp_path / "tiny.gguf", model, model.weights()), tmp_path / "tiny")
    tokens = ["<|endoftext|>", "ab", *(chr(0x100 + index) for index in range(model.vocab - 2))]
    tokens[2:4] = ["a", "b"]
    types = [3, *([1] * (model.vocab - 1))]
    written = byte_level_bpe(tokens, types, ["a b"], "smollm", None)
    (folder / "tokenizer.json").write_text(json.dumps(written), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    return folder


@pytest.mark.parametrize(
    "model",
    [TinyModel(tied=True), TinyModel(architecture="qwen2", seed=3), TinyModel(architecture="qwen3", seed=4)],
    ids=lambda model: model.architecture,
)
def test_the_written_model_is_the_folder(tmp_path: Path, model: TinyModel) -> None:
    folder = byte_level_folder(tmp_path, model)
    exact_gguf.write_exact_gguf(folder, tmp_path / "exact.gguf")
    back = convert_gguf(tmp_path / "exact.gguf", tmp_path / "back")
    assert (back / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert json.loads((back / "tokenizer.json").read_text()) == json.loads((folder / "tokenizer.json").read_text())
    same = ("model_type", "hidden_size", "num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "vocab_size")
    configs = [json.loads((each / "config.json").read_text()) for each in (folder, back)]
    assert {key: configs[0][key] for key in same} == {key: configs[1][key] for key in same}


def test_a_tokenizer_that_gguf_has_no_name_for(tmp_path: Path) -> None:
    model = TinyModel()
    folder = convert_gguf(write_gguf(tmp_path / "tiny.gguf", model, model.weights()), tmp_path / "tiny")
    with pytest.raises(SystemExit, match="no byte-level BPE"):
        exact_gguf.write_exact_gguf(folder, tmp_path / "exact.gguf")


def reports() -> tuple[dict[str, Any], dict[str, Any]]:
    head = {"model": "m", "text": "t.txt", "tokens": 64, "context": 32}
    peer = {
        **head,
        "text_sha256": "0",
        "kvanta_window_bits": {"int8": 8.25, "int4": 5.5, "int2": 3.0},
        "rows": [
            {"format": "q8_0", "rotated": True, "bits_per_element": 8.5, "kl_mean": 0.004},
            {"format": "q4_0", "rotated": False, "bits_per_element": 4.5, "kl_mean": 0.04},
        ],
    }
    rows = {"int8": (8.25, 0.001), "int4": (4.5, 0.008), "int2": (2.5, 0.5), "other": (2.0, 0.6)}
    formats = {name: {"bits_per_element": bits, "kl_mean": kl} for name, (bits, kl) in rows.items()}
    return peer, {**head, "text": "far/t.txt", "formats": formats}


def test_verdicts() -> None:
    peer, own = reports()
    first, second = compare(peer, own)
    assert first["label"] == "q8_0, rotated (8.5)"
    assert first["by_pages"] == {"label": "int8 (8.25)", "format": "int8", "kl_mean": 0.001, "times": 4.0}
    assert first["by_window"] == first["by_pages"]
    assert second["by_pages"]["label"] == "int4 (4.5)"
    assert second["by_pages"]["times"] == 5.0
    assert second["by_window"]["label"] == "int2 (3)"  # int4's exact pages make it larger than q4_0


@pytest.mark.parametrize("key", ["model", "text", "text_sha256", "tokens", "context"])
def test_no_verdict_on_other_windows(key: str) -> None:
    peer, own = reports()
    assert all("by_pages" not in row and "by_window" not in row for row in compare(peer, {**own, key: "other"}))


def test_no_verdict_without_figures() -> None:
    peer, own = reports()
    own["formats"] = {"int8": {"bits_per_element": 8.25, "needle": 1.0}}
    assert all("by_pages" not in row for row in compare(peer, own))
