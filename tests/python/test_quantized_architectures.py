"""Every architecture from checkpoints with quantized weights, against their dequantized twins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import quantized_checkpoints as layouts
import tiny_classes
import tiny_models
import tolerance
import torch
import transformers
from logits_oracle import largest_error, logits, rms_error
from model_support import RecordSupport
from published_layouts import LAYOUTS, layout_of, unpublish

from kvanta import LLM, _core
from kvanta.fleet.plan import plan

TOKENS = np.random.default_rng(3).integers(0, tiny_models.VOCAB, 70).astype(np.int32)
# GPT-OSS has its own MXFP4 (test_mxfp4_experts.py); GPT-2's matrices are no linear layers, which quantizers take.
ARCHITECTURES = [name for name in _core.architectures() if name not in ("GptOssForCausalLM", "GPT2LMHeadModel")]


def load_twin(folder: Path, architecture: str) -> transformers.PreTrainedModel:
    if layout := layout_of(architecture):
        unpublish(folder, layout)
        architecture = tiny_models.class_of(LAYOUTS[layout].base).__name__
    model: transformers.PreTrainedModel = getattr(transformers, architecture).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model


@pytest.mark.rotation("architecture", 4, "layout")
@pytest.mark.parametrize("layout", ["fp8_blocks", "ct_int8", "awq", "modelopt_nvfp4"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_those_of_the_dequantized_weights(
    architecture: str, layout: str, tmp_path: Path, record_support: RecordSupport
) -> None:
    folder, twin = tmp_path / "quantized", tmp_path / "twin"
    # Every row goes to all experts: rounding must not choose others.
    model = tiny_classes.make_of_class(architecture, **tiny_classes.experts(4, 4))
    tiny_models.save(model, tmp_path / "source", torch.bfloat16)
    layouts.write(tmp_path / "source", folder, twin, layouts.LAYOUTS[layout])
    dequantized = load_twin(twin, architecture)
    expected = tiny_models.expected_logits(dequantized, TOKENS)
    assert largest_error(logits(folder, tokens=TOKENS), expected) < tolerance.F32_LOGITS
    llm = LLM(folder, tokenizer="stories260k", kv_cache_dtype="fp32", max_model_len=128, threads=2)
    cost = rms_error(tiny_models.rounded_logits(dequantized, TOKENS, torch.bfloat16, torch.float32), expected)
    assert rms_error(llm.logits(TOKENS), expected) < 2 * tolerance.LATENT_ROUNDING_RATIO * cost
    in_16_bits = plan(str(folder), 1 << 30, options={"weight_dtype": "bf16"})["weight_bytes"]
    # Granite's routed experts are no modules: what quantizes modules leaves them in 16 bits.
    share = 0.95 if architecture.startswith(("GraniteMoe", "Step3p")) else 0.85
    assert llm.stats()["weight_bytes"] < share * in_16_bits, "codes are kept"
    record_support(folder, layout)
