"""Logits of the language models of tiny checkpoints of text and vision, for prompts of text, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import tiny_models
import tiny_multimodal
import tolerance
from logits_oracle import TOKENS, edit_names, largest_error, logits
from model_support import RecordSupport


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_language_model_of_gemma3_multimodal(prefix: str, tmp_path: Path, record_support: RecordSupport) -> None:
    model = tiny_multimodal.make_gemma3_multimodal()
    tiny_models.save(model, tmp_path)
    expected = tiny_models.expected_logits(model, TOKENS)
    for saved in ("language_model.model.", "model.language_model."):
        edit_names(tmp_path, lambda name, saved=saved: name.replace(saved, prefix))  # type: ignore[misc]
    assert any(name.startswith(prefix) for name in safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS
    record_support(tmp_path, "F32")


@pytest.mark.parametrize("text", ["Mistral", "Ministral3"])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_language_model_of_mistral3(text: str, prefix: str, tmp_path: Path, record_support: RecordSupport) -> None:
    model = tiny_multimodal.make_mistral3(text)
    tiny_models.save(model, tmp_path)
    expected = tiny_models.expected_logits(model, TOKENS)
    head = "lm_head.weight" if prefix.startswith("model.") else "language_model.lm_head.weight"

    def rename(name: str) -> str:
        for saved in ("language_model.model.", "model.language_model."):
            if name.startswith(saved):
                return prefix + name.removeprefix(saved)
        return head if name.endswith("lm_head.weight") else name

    edit_names(tmp_path, rename)
    assert any(name.startswith(prefix) for name in safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS
    tiny_models.edit_config(tmp_path, tie_word_embeddings=...)  # as on the hub: by default it is true
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS
    record_support(tmp_path, "F32")


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_language_models_of_qwen_vl(name: str, tmp_path: Path, record_support: RecordSupport) -> None:
    """The three positions of a token of text are the same."""
    model = tiny_multimodal.make_qwen_vl(name)
    tiny_models.save(model, tmp_path)
    expected = tiny_models.expected_logits(model, TOKENS)
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS
    record_support(tmp_path, "F32")
    tiny_models.edit_config(tmp_path, **{"text_config.rope_parameters.mrope_section": [1, 3, 4]})
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
def test_first_checkpoints_of_qwen_vl(name: str, tmp_path: Path) -> None:
    """The language model's keys are at the top of config.json, its tensors next to those of vision."""
    windows = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    model = tiny_multimodal.make_qwen_vl(name, **windows)
    tiny_models.save(model, tmp_path)
    expected = tiny_models.expected_logits(model, TOKENS)
    edit_names(tmp_path, lambda key: key.replace("model.language_model.", "model.").replace("model.visual.", "visual."))
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
    del text["model_type"], text["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(text | config))
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS
    loaded = tiny_models.expected_logits(tiny_multimodal.load_multimodal(tmp_path), TOKENS)
    assert largest_error(loaded, expected) < tolerance.F32_LOGITS
