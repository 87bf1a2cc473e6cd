"""Logits of the language models of tiny checkpoints of text and vision, for prompts of text, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import tiny_models
import tiny_multimodal
import tiny_text_and_images
import tolerance
from logits_oracle import TOKENS, assert_equals_transformers, edit_names, largest_error, logits
from model_support import RecordSupport

from kvanta import InputError
from kvanta.files.json_file import text_config


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


@pytest.mark.parametrize("text", ["Mistral", "Ministral3", "Mistral4"])
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


@pytest.mark.parametrize("name", ["Glm4v", "Glm46V"])
def test_language_models_of_glm4v(name: str, tmp_path: Path, record_support: RecordSupport) -> None:
    model = tiny_text_and_images.make_glm4v(name)
    tiny_models.save(model, tmp_path)
    assert_equals_transformers(model, tmp_path)
    record_support(tmp_path, "F32")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, "") for name in tiny_text_and_images.CLASSES),
        *(("Llava", text) for text in ("Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma2")),
        *(("InternVL", text) for text in ("Llama", "Qwen3", "Qwen3Moe", "GptOss")),
        ("AyaVision", "Cohere"),
        ("Lfm2Vl", "Lfm2Moe"),
        ("Kimi_K25", "DeepseekV2"),
    ],
)
def test_classes_whose_language_model_is_another(
    name: str, text: str, tmp_path: Path, record_support: RecordSupport
) -> None:
    model = tiny_text_and_images.make(name, text)
    tiny_models.save(model, tmp_path)
    assert_equals_transformers(model, tmp_path)
    record_support(tmp_path, "F32")


@pytest.mark.parametrize("name", ["Llava", "InternVL"])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_both_prefixes_of_language_models(name: str, prefix: str, tmp_path: Path) -> None:
    model = tiny_text_and_images.make(name)
    tiny_models.save(model, tmp_path)
    head = "lm_head." if prefix.startswith("model.") else "language_model.lm_head."
    names = {"language_model.model.": prefix, "language_model.lm_head.": head}
    edit_names(tmp_path, lambda key: next((key.replace(a, b) for a, b in names.items() if key.startswith(a)), key))
    assert_equals_transformers(model, tmp_path)


@pytest.mark.parametrize("kimi", ["KimiK25ForConditionalGeneration kimi_k25", "KimiVLForConditionalGeneration kimi_vl"])
def test_published_names_of_kimi(kimi: str, tmp_path: Path) -> None:
    model = tiny_text_and_images.make("Kimi_K25")
    tiny_models.save(model, tmp_path)
    name, model_type = kimi.split()
    tiny_models.edit_config(
        tmp_path, architectures=[name], model_type=model_type, **{"text_config.model_type": "kimi_k2"}
    )
    assert_equals_transformers(model, tmp_path)


def test_first_model_type_of_exaone_4_5(tmp_path: Path) -> None:
    model = tiny_text_and_images.make("Exaone4_5_")
    tiny_models.save(model, tmp_path)
    tiny_models.edit_config(tmp_path, **{"text_config.model_type": "exaone4_5_text"})
    assert_equals_transformers(model, tmp_path)


@pytest.mark.parametrize(
    ("name", "whole", "model_type"),
    [
        ("Qwen2_5Omni", "Qwen2_5OmniModel", "qwen2_5_omni"),
        ("Qwen3OmniMoe", "Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe"),
    ],
)
def test_thinkers_of_qwen_omni(
    name: str, whole: str, model_type: str, tmp_path: Path, record_support: RecordSupport
) -> None:
    """Alone, and as a part of the whole model, whose talker is not read."""
    model = tiny_text_and_images.make_omni_thinker(name)
    tiny_models.save(model, tmp_path)
    assert_equals_transformers(model, tmp_path)
    record_support(tmp_path, "F32")
    thinker = json.loads((tmp_path / "config.json").read_text())
    config = {"architectures": [whole], "model_type": model_type, "thinker_config": thinker, "talker_config": {}}
    assert text_config(config) == text_config(thinker) == thinker["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    edit_names(tmp_path, lambda key: f"thinker.{key}")
    assert_equals_transformers(model, tmp_path)


@pytest.mark.parametrize("text", ["llava", "gemma3", "bert", ""])
def test_a_language_model_of_an_unknown_class(text: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_text_and_images.make("Llava"), tmp_path)
    tiny_models.edit_config(tmp_path, **{"text_config.model_type": text})
    with pytest.raises(InputError, match=rf"'text_config\.model_type' is '{text}'; expected one of llama, mistral, "):
        logits(tmp_path)
