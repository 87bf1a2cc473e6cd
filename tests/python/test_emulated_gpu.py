"""Every architecture on the emulated GPU (tests/emulated): the CPU's logits in float32, or a refusal by its reason."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import gguf
import gguf_models
import pytest
import quantized_checkpoints as layouts
import tiny_classes
import tiny_models
import tolerance
import torch
from model_support import RecordSupport

from kvanta import _core
from kvanta.checkpoint.resolve import resolve_model

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / os.environ.get("KVANTA_BUILD", "build/release") / "tests/emulated_divergence"
TOKENS = [1, 5, 9, 13, 17, 21, 40, 3, 77, 30, 31, 32, 60, 2]
EXPERTS_WITH_BIASES = "does not support experts with biases; device cpu does"
EXPERTS_WITH_SCALED_INPUTS = "does not support experts whose inputs are multiplied by the router's weights; device cpu"
LAYER_NORM = "does not support LayerNorm; device cpu does"
UNGATED = "does not support MLPs without a gate; device cpu does"
RECURRENT = "does not support Gated DeltaNet layers; device cpu does"
SHORT_CONVOLUTIONS = "does not support gated short convolutions; device cpu does"
MAMBA2 = "does not support Mamba-2 layers; device cpu does"
REFUSED = {
    "ApertusForCausalLM": UNGATED,
    "ArceeForCausalLM": UNGATED,
    "BambaForCausalLM": MAMBA2,
    "Cohere2ForCausalLM": LAYER_NORM,
    "CohereForCausalLM": LAYER_NORM,
    "FalconForCausalLM": LAYER_NORM,
    "FalconH1ForCausalLM": MAMBA2,
    "GPT2LMHeadModel": LAYER_NORM,
    "GPTNeoXForCausalLM": LAYER_NORM,
    "GptOssForCausalLM": EXPERTS_WITH_BIASES,
    "GraniteMoeHybridForCausalLM": MAMBA2,
    "Lfm2ForCausalLM": SHORT_CONVOLUTIONS,
    "Lfm2MoeForCausalLM": SHORT_CONVOLUTIONS,
    "NemotronHForCausalLM": MAMBA2,
    "Llama4ForCausalLM": EXPERTS_WITH_SCALED_INPUTS,
    "Llama4ForConditionalGeneration": EXPERTS_WITH_SCALED_INPUTS,
    "NemotronForCausalLM": LAYER_NORM,
    "OPTForCausalLM": LAYER_NORM,
    "PhiForCausalLM": LAYER_NORM,
    "Qwen3NextForCausalLM": RECURRENT,
    "StableLmForCausalLM": LAYER_NORM,
    "Starcoder2ForCausalLM": LAYER_NORM,
    "Qwen3_5ForCausalLM": RECURRENT,
    "Qwen3_5ForConditionalGeneration": RECURRENT,
    "Qwen3_5MoeForCausalLM": RECURRENT,
    "Qwen3_5MoeForConditionalGeneration": RECURRENT,
}

pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason=f"{PROGRAM} is not built; scripts/test builds it")


def run(folder: Path, dtype: str, cache: str) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAM), str(folder), dtype, cache, "auto", *map(str, TOKENS)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def divergence(folder: Path, dtype: str, cache: str) -> tuple[float, float]:
    """Mean KL divergence from the CPU's, and the largest difference of logits as a share of the largest logit."""
    done = run(folder, dtype, cache)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"14 tokens: mean (\S+), max \S+, logits (\S+)\n", done.stdout)
    assert found, done.stdout
    return float(found[1]), float(found[2])


@pytest.mark.rotation("architecture", 3, 0)
@pytest.mark.parametrize("architecture", _core.architectures())
def test_logits_equal_the_cpus(architecture: str, tmp_path: Path, record_support: RecordSupport) -> None:
    model = tiny_classes.make_of_class(architecture, **tiny_classes.experts(4, 2))
    tiny_models.save(model, tmp_path, torch.bfloat16)
    if architecture in REFUSED:
        done = run(tmp_path, "float32", "fp32")
        assert done.returncode == 1
        assert REFUSED[architecture] in done.stderr
        reason = done.stderr.strip().removeprefix("emulated_divergence: cuda-emulated ").partition(";")[0]
        record_support(tmp_path, "BF16", "gpu_emulated", reason)
        return
    _, difference = divergence(tmp_path, "float32", "fp32")
    assert difference < tolerance.F32_LOGITS
    record_support(tmp_path, "BF16", "gpu_emulated")


def test_a_gate_without_recurrent_layers_is_refused(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    model = tiny_classes.make_of_class("Qwen3NextForCausalLM", **tiny_classes.experts(4, 2), **layers)
    tiny_models.save(model, tmp_path, torch.bfloat16)
    done = run(tmp_path, "float32", "fp32")
    assert done.returncode == 1
    assert "does not support gates of the attention's output; device cpu does" in done.stderr


@pytest.mark.parametrize("layout", ["fp8_blocks", "awq", "modelopt_nvfp4"])
def test_quantized_weights(layout: str, tmp_path: Path, record_support: RecordSupport) -> None:
    tiny_models.save(tiny_classes.make_of_class("LlamaForCausalLM"), tmp_path / "source", torch.bfloat16)
    layouts.write(tmp_path / "source", tmp_path / "quantized", tmp_path / "twin", layouts.LAYOUTS[layout])
    _, difference = divergence(tmp_path / "quantized", "float32", "fp32")
    assert difference < tolerance.F32_LOGITS
    record_support(tmp_path / "quantized", layout, "gpu_emulated")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
def test_gguf_blocks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_support: RecordSupport) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    source = gguf_models.make_source(tmp_path / "source", "Llama", **sizes)
    file = gguf_models.write(source, tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    _, difference = divergence(resolve_model(file).path, "float32", "fp32")
    assert difference < tolerance.F32_LOGITS
    record_support(file, f"GGUF {kind}", "gpu_emulated")
