"""GGUF files of Qwen3-Next and Qwen3.5: older layouts, layers that are left out, and files that do not fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf_hybrids
import gguf_models
import numpy as np
import pytest
import safetensors.torch
import tolerance
import torch
from test_gguf_models import float32_error, logits, make
from tiny_gguf import rewrite

from kvanta import InputError
from kvanta.gguf.convert import convert_gguf, index_gguf


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))


def test_older_files_of_qwen3_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k, v and z in one matrix, as the checkpoint has them."""
    monkeypatch.setattr(gguf_hybrids, "places", lambda _config: {})
    file, source = make(tmp_path, "qwen3_next", gguf_models.Kind.Q8_0)
    assert b"blk.0.ssm_in.weight" in file.read_bytes()
    assert float32_error(file, source) < tolerance.F32_LOGITS


def test_a_wrong_order_of_value_heads_is_noticed(tmp_path: Path) -> None:
    file, source = make(tmp_path, "qwen3_5")
    folder = index_gguf(file, tmp_path / "folder")
    config = (folder / "config.json").read_text()
    assert '"linear_value_heads_tiled": true' in config
    (folder / "config.json").write_text(config.replace('"linear_value_heads_tiled": true', '"ignored": 0'))
    assert float32_error(folder, source) > 10 * tolerance.F32_LOGITS


@pytest.mark.parametrize("model", ["qwen3_5", "qwen3_5_interval"])
def test_layers_that_predict_further_tokens_are_left_out(model: str, tmp_path: Path) -> None:
    file, source = make(tmp_path, model)
    layers, hidden = source.config["num_hidden_layers"], source.config["hidden_size"]
    changes: dict[str, Any] = {
        "general.architecture": "qwen35",
        "qwen35.block_count": layers + 1,
        "qwen35.nextn_predict_layers": 1,
    }
    if model == "qwen3_5":
        flags = [kind == "linear_attention" for kind in source.config["layer_types"]]
        changes["qwen35.attention.recurrent_layers"] = [*flags, False]
    projection = np.zeros((hidden, 2 * hidden), np.float32)
    rewrite(file, changes, {f"blk.{layers}.nextn.eh_proj.weight": projection})
    assert float32_error(file, source) < tolerance.F32_LOGITS


@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_5"])
def test_converted_folders_are_read(model: str, tmp_path: Path) -> None:
    """In bf16: the error is that of a checkpoint in bf16, which the choice of experts multiplies."""
    file, source = make(tmp_path, model)
    rounded = shutil.copytree(source.folder, tmp_path / "rounded")
    tensors = {name: torch.from_numpy(values).bfloat16() for name, values in source.tensors.items()}
    safetensors.torch.save_file(tensors, rounded / "model.safetensors", metadata={"format": "pt"})
    folder = convert_gguf(file, tmp_path / "folder")
    for part in folder.glob("tokenizer*"):
        shutil.copy(part, rounded)
    assert float32_error(folder, source) < 2 * float32_error(rounded, source)


LINEAR = r"model\.layers\.{}\.linear_attn\.{}'"


@pytest.mark.parametrize(
    ("changes", "tensors", "reason"),
    [
        ({"block_count": 2**30}, {}, "says 1073741824 layers in"),
        ({"ssm.inner_size": 126}, {}, "4 value heads of 126 channels together, which do not fit"),
        ({"ssm.inner_size": 256}, {}, r"'blk\.0\.\w+\.weight' has shape"),
        ({"ssm.time_step_rank": 0}, {}, r"'qwen35\.ssm\.time_step_rank' must be in 1"),
        ({"ssm.group_count": None}, {}, r"lacks the key 'qwen35\.ssm\.group_count'"),
        ({"ssm.group_count": 3, "ssm.time_step_rank": 2}, {}, "has shape"),
        ({"ssm.conv_kernel": 3}, {}, r"'blk\.0\.ssm_conv1d\.weight' has shape \(256, 4\), not \(256, 1, 3\)"),
        ({}, {"blk.2.ssm_conv1d.weight": (4, 256)}, r"'blk\.2\.ssm_conv1d\.weight' has shape \(4, 256\), not"),
        ({}, {"blk.0.ssm_a": (2,)}, r"'blk\.0\.ssm_a' has shape \(2,\), not \(4,\)"),
        ({}, {"blk.0.ssm_a": None}, "lacks the tensor for '" + LINEAR.format(0, "A")),
        ({}, {"blk.3.attn_gate.weight": None}, "lacks the tensor for '" + LINEAR.format(3, r"in_proj_z\.weight")),
        ({}, {"blk.1.attn_v.weight": None}, r"lacks the tensor for 'model\.layers\.1\.self_attn\.v_proj\.weight'"),
        ({}, {"blk.0.ssm_a.weight": (4,)}, r"'blk\.0\.ssm_a\.weight' does not belong"),
        ({}, {"blk.0.ssm_norm": (32,)}, r"'blk\.0\.ssm_norm' does not belong"),
        ({}, {"blk.0.ssm_dt.weight": (4,)}, r"'blk\.0\.ssm_dt\.weight' does not belong"),
        ({"attention.recurrent_layers": [True] * 3}, {}, "has 3 entries, not 4"),
        ({"attention.recurrent_layers": [1.0] * 4}, {}, "is not a list of int"),
        ({"attention.recurrent_layers": [True] * 4}, {}, "lacks the tensor for '" + LINEAR.format(1, "A")),
        ({"attention.recurrent_layers": None}, {}, "lacks the tensor for '" + LINEAR.format(1, "A")),
        ({"nextn_predict_layers": 4}, {}, "has 4 blocks, all of which predict further tokens"),
    ],
)
def test_files_that_do_not_fit(
    changes: dict[str, Any], tensors: dict[str, tuple[int, ...] | None], reason: str, tmp_path: Path
) -> None:
    file, _ = make(tmp_path, "qwen3_5")
    keys = {"general.architecture": "qwen35"} | {f"qwen35.{key}": value for key, value in changes.items()}
    rewrite(file, keys, {name: None if shape is None else np.ones(shape, "f4") for name, shape in tensors.items()})
    with pytest.raises(InputError, match=reason) as caught:
        index_gguf(file, tmp_path / "folder")
    assert "m.gguf" in str(caught.value)
    assert not (tmp_path / "folder").exists()


def test_a_projection_that_is_missing(tmp_path: Path) -> None:
    """One of the two layouts of Qwen3-Next must be there, whole."""
    file, _ = make(tmp_path, "qwen3_next")
    rewrite(file, {"general.architecture": "qwen3next"}, {"blk.0.attn_qkv.weight": None})
    with pytest.raises(InputError, match=LINEAR.format(0, r"in_proj_qkv\.weight")):
        logits(file)
