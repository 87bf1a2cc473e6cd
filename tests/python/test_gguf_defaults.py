"""Keys that a GGUF file leaves out, or has in another form: what llama.cpp makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvanta.errors import InputError
from kvanta.gguf.config import hugging_face_config
from kvanta.gguf.metadata import Metadata
from kvanta.gguf.vocabulary import Vocabulary

SIZES = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def metadata(folder: Path, architecture: str, keys: dict[str, Any]) -> Metadata:
    """A file with these keys, read: without the architecture's name but tokenizer.*; None leaves one out."""
    path = folder / "m.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in keys.items():
        key = name if name.startswith("tokenizer.") else f"{architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    for index in range(6):  # as many as there are layers
        writer.add_tensor(f"blk.{index}.attn_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Metadata(path)


def config(folder: Path, architecture: str, **keys: Any) -> dict[str, Any]:
    named = {name.replace("__", "."): value for name, value in keys.items()}
    return hugging_face_config(metadata(folder, architecture, {**SIZES, **named}), 300)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope__scaling__type": "linear"}, None),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.0}, None),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
    ],
)
def test_rope_scaling(keys: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path) -> None:
    assert config(tmp_path, "llama", **keys)["rope_scaling"] == expected


def test_a_number_for_every_layer_may_be_a_list(tmp_path: Path) -> None:
    assert config(tmp_path, "llama", attention__head_count_kv=[2, 2])["num_key_value_heads"] == 2
    with pytest.raises(InputError, match="must be a whole number"):
        config(tmp_path, "llama", attention__head_count_kv=[2, 1])


def test_gemma2_of_the_first_files(tmp_path: Path) -> None:
    found = config(tmp_path, "gemma2")
    assert found["attn_logit_softcapping"] == 50.0
    assert found["final_logit_softcapping"] == 30.0
    assert found["sliding_window"] == 4096


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({"attention__sliding_window": 16}, "sssssf"),
        ({"attention__sliding_window": 16, "attention__sliding_window_pattern": 3}, "ssfssf"),
        ({"attention__sliding_window": 16, "attention__sliding_window_pattern": 0}, "ssssss"),
        ({"attention__sliding_window": 16, "attention__sliding_window_pattern": [False] + [True] * 5}, "fsssss"),
        ({"attention__sliding_window": 0}, "ffffff"),
        ({}, "ffffff"),
    ],
)
def test_windows_of_gemma3(keys: dict[str, Any], windows: str, tmp_path: Path) -> None:
    found = config(tmp_path, "gemma3", block_count=6, final_logit_softcapping=20.0, **keys)
    assert "".join(name[0] for name in found["layer_types"]) == windows
    assert found["final_logit_softcapping"] == 20.0


@pytest.mark.parametrize(
    ("architecture", "keys", "reason"),
    [
        ("llama4", {"attention__sliding_window": 0}, "no chunks in any layer"),
        (
            "deepseek2",
            {
                "attention__kv_lora_rank": 16,
                "rope__dimension_count": 8,
                "attention__key_length": 24,
                "attention__value_length": 16,
                "attention__temperature_scale": 0.1,
            },
            "queries that grow with the position",
        ),
    ],
)
def test_keys_that_change_logits_are_not_ignored(
    architecture: str, keys: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=reason):
        config(tmp_path, architecture, **keys)


def vocabulary(folder: Path, model: str, texts: dict[str, int], **keys: Any) -> Vocabulary:
    """With single letters after `texts`, each with its type."""
    tokens = {**texts, **dict.fromkeys(map(chr, range(ord("a"), ord("z") + 1)), NORMAL)}
    named = {
        "model": model,
        "tokens": list(tokens),
        "token_type": list(tokens.values()),
        "scores": [0.0] * len(tokens),
        "merges": ["a b"] if model == "gpt2" else None,
        "pre": "gpt-2" if model == "gpt2" else None,
        **keys,
    }
    return Vocabulary(metadata(folder, "llama", {f"tokenizer.ggml.{name}": value for name, value in named.items()}))


LLAMA2 = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}


def test_special_tokens_of_llama2_have_defaults(tmp_path: Path) -> None:
    found = vocabulary(tmp_path, "llama", LLAMA2)
    assert (found.bos, found.eos, found.unknown) == (1, 2, 0)
    assert found.tokenizer["post_processor"]["single"][0] == {"SpecialToken": {"id": "<s>", "type_id": 0}}
    assert vocabulary(tmp_path, "gpt2", {"x y": NORMAL, "ab": NORMAL}).bos is None


def test_a_padding_token_beyond_the_vocabulary_is_left_out(tmp_path: Path) -> None:
    assert vocabulary(tmp_path, "llama", LLAMA2, padding_token_id=29).padding is None
    with pytest.raises(InputError, match="outside the vocabulary"):
        vocabulary(tmp_path, "llama", LLAMA2, eos_token_id=29)


def test_texts_end_with_eos_where_the_file_says_so(tmp_path: Path) -> None:
    found = vocabulary(tmp_path, "llama", LLAMA2, add_eos_token=True)
    names = [list(part) for part in found.tokenizer["post_processor"]["single"]]
    assert names == [["SpecialToken"], ["Sequence"], ["SpecialToken"]]


def test_empty_tokens_get_names(tmp_path: Path) -> None:
    path_tokens = [*LLAMA2, "", ""]
    found = vocabulary(tmp_path, "llama", LLAMA2, tokens=path_tokens, token_type=[2, 3, 3, 1, 1], scores=[0.0] * 5)
    assert found.tokens[3:] == ["[EMPTY_3]", "[EMPTY_4]"]


@pytest.mark.parametrize(
    ("texts", "endings"),
    [
        ({"<|eot_id|>": CONTROL, "<|eom_id|>": CONTROL}, ["<|eot_id|>", "<|eom_id|>"]),
        ({"<|im_end|>": USER_DEFINED}, ["<|im_end|>"]),
        ({"<|end|>": CONTROL}, ["<|end|>"]),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}, ["<|return|>", "<|call|>"]),
        ({"</s>": USER_DEFINED}, []),
        ({"</s>": CONTROL}, ["</s>"]),
    ],
)
def test_endings(texts: dict[str, int], endings: list[str], tmp_path: Path) -> None:
    found = vocabulary(tmp_path, "gpt2", {**texts, "ab": NORMAL})
    assert [found.tokens[token] for token in found.endings] == endings
