"""Every architecture on the emulated GPU (tests/emulated): the CPU's logits in float32."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_models
import pytest
import quantized_checkpoints as layouts
import tiny_classes
import tiny_models
import tolerance
import torch
from deepseek_v4_weights import save_published
from divided_models import gguf_file, quantized, saved
from model_support import RecordSupport

from kvanta import LLM, InputError, _core
from kvanta.checkpoint.resolve import resolve_model

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / os.environ.get("KVANTA_BUILD", "build/release") / "tests/emulated_divergence"
TOKENS = [1, 5, 9, 13, 17, 21, 40, 3, 77, 30, 31, 32, 60, 2]
LONG = (TOKENS * 3)[:38]  # a page closes

pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason=f"{PROGRAM} is not built; scripts/test builds it")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def divergence(folder: Path, dtype: str, cache: str, tokens: list[int] = TOKENS) -> tuple[float, float]:
    """Mean KL divergence from the CPU's, and the largest difference of logits as a share of the largest logit."""
    done = run(folder, dtype, cache, "auto", *tokens)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"\d+ tokens: mean (\S+), max \S+, logits (\S+)\n", done.stdout)
    assert found, done.stdout
    return float(found[1]), float(found[2])


@pytest.mark.rotation("architecture", 3, 0)
@pytest.mark.parametrize("architecture", _core.architectures())
def test_logits_equal_the_cpus(architecture: str, tmp_path: Path, record_support: RecordSupport) -> None:
    model = tiny_classes.make_of_class(architecture, **tiny_classes.experts(4, 2))
    tiny_models.save(model, tmp_path, torch.bfloat16)
    _, difference = divergence(tmp_path, "float32", "fp32")
    assert difference < tolerance.F32_LOGITS
    record_support(tmp_path, "BF16", "gpu_emulated")


@pytest.mark.parametrize("cache", ["fp32", "int8"])
def test_attention_in_both_directions(cache: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
    }
    model = tiny_models.make_model("Gemma3", use_bidirectional_attention=True, **sizes).base_model
    tiny_models.save(model, tmp_path, torch.bfloat16)
    done = run("--embed", tmp_path, cache, *LONG, *LONG)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"76 tokens: embeddings (\S+)\n", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < (tolerance.F32_LOGITS if cache == "fp32" else 0.01)


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "FalconH1ForCausalLM", "Lfm2ForCausalLM"])
def test_states_do_not_depend_on_steps(architecture: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_classes.make_of_class(architecture), tmp_path, torch.bfloat16)
    done = run("--bits", 16, tmp_path, *TOKENS, *TOKENS[:7])
    assert done.returncode == 0, done.stderr
    accepted = re.fullmatch(r"(\d+) drafts accepted\n", done.stdout)
    assert accepted, done.stdout
    assert int(accepted[1]) > 2


@pytest.mark.parametrize("architecture", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_chosen_tokens_are_the_cpus_and_do_not_depend_on_steps(architecture: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_classes.make_of_class(architecture, index_topk=4), tmp_path, torch.bfloat16)
    _, difference = divergence(tmp_path, "float32", "fp32")
    assert difference < tolerance.F32_LOGITS
    done = run("--bits", 16, tmp_path, *TOKENS, *TOKENS[:7])
    assert done.returncode == 0, done.stderr


def test_tile_groups_of_latents_do_not_depend_on_steps(tmp_path: Path) -> None:
    latents = {"num_attention_heads": 40, "num_key_value_heads": 40, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    sparse = {"index_topk": 12, "index_head_dim": 80}
    saved("DeepseekV32", tmp_path, num_hidden_layers=2, **latents, **sparse)
    done = run("--bits", 16, tmp_path, *TOKENS, *TOKENS[:7])
    assert done.returncode == 0, done.stderr


# More tokens than a page of 64 has; a text that drafts are found in.
PAGES = [*[(7 * i * i + 3 * i) % 91 + 3 for i in range(40)] * 2, 10, 13, 37, 87, 66]


def test_windows_and_entries_give_the_cpus_logits_and_do_not_depend_on_steps(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    layers: dict[str, Any] = {
        "num_hidden_layers": 3,
        "layer_types": kinds,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    }
    tiny_models.save(tiny_models.make_model("DeepseekV4", **layers), tmp_path, torch.bfloat16)
    _, difference = divergence(tmp_path, "float32", "fp32", PAGES)
    assert difference < tolerance.F32_LOGITS
    done = run("--bits", 64, tmp_path, *PAGES)
    assert done.returncode == 0, done.stderr


def test_published_weights_of_deepseek_v4(tmp_path: Path, record_support: RecordSupport) -> None:
    save_published(tmp_path / "published", tmp_path / "twin")
    _, difference = divergence(tmp_path / "published", "float32", "fp32", PAGES[:40])
    assert difference < tolerance.F32_LOGITS
    mean, _ = divergence(tmp_path / "published", "float16", "fp32", PAGES[:40])  # codes are kept
    assert mean < tolerance.ACTIVATIONS_OF_11_BITS
    record_support(tmp_path / "published", "fp8_blocks", "gpu_emulated")
    record_support(tmp_path / "published", "mxfp4", "gpu_emulated")


def test_a_gate_without_recurrent_layers(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    model = tiny_classes.make_of_class("Qwen3NextForCausalLM", **tiny_classes.experts(4, 2), **layers)
    tiny_models.save(model, tmp_path, torch.bfloat16)
    _, difference = divergence(tmp_path, "float32", "fp32")
    assert difference < tolerance.F32_LOGITS


@pytest.mark.parametrize("layout", ["fp8_blocks", "awq", "modelopt_nvfp4"])
def test_quantized_weights(layout: str, tmp_path: Path, record_support: RecordSupport) -> None:
    tiny_models.save(tiny_classes.make_of_class("LlamaForCausalLM"), tmp_path / "source", torch.bfloat16)
    layouts.write(tmp_path / "source", tmp_path / "quantized", tmp_path / "twin", layouts.LAYOUTS[layout])
    _, difference = divergence(tmp_path / "quantized", "float32", "fp32")
    assert difference < tolerance.F32_LOGITS
    # Kept as they are, with activations of 11 bits.
    mean, _ = divergence(tmp_path / "quantized", "float16", "fp32")
    assert mean < tolerance.ACTIVATIONS_OF_11_BITS
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


def bits_of_ranks(model: Path, cache: str, ranks: int) -> str:
    """Output of rank 0: the bits of the logits, and the tokens of requests."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [PROGRAM, "--rank", str(rank), str(ranks), folder, model, cache, *map(str, LONG)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            ended = [process.communicate(timeout=300) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert [process.returncode for process in processes] == [0] * ranks, [error for _, error in ended]
        return ended[0][0]


# Each: a checkpoint, the cache's format, and numbers of ranks.
DIVIDED: dict[str, tuple[Callable[[Path], Path], str, tuple[int, ...]]] = {
    "Llama": (lambda folder: saved("Llama", folder), "int4+hadamard", (2, 4)),
    "Qwen3 with tied embeddings": (lambda folder: saved("Qwen3", folder, tie_word_embeddings=True), "bf16", (2,)),
    "one KV head": (lambda folder: saved("Llama", folder, num_key_value_heads=1), "kivi4", (4,)),
    "Qwen3Moe": (lambda folder: saved("Qwen3Moe", folder), "int4", (2, 4)),
    "GptOss": (lambda folder: saved("GptOss", folder), "fp8_e4m3", (4,)),
    "DeepseekV32": (lambda folder: saved("DeepseekV32", folder), "mla_int4", (4,)),
    "DeepseekV4": (lambda folder: saved("DeepseekV4", folder), "fp8", (2, 4)),
    "AWQ": (lambda folder: quantized(folder, "awq"), "k=int8,v=int4", (4,)),
    "Q4_0": (lambda folder: gguf_file(folder, "Qwen3Moe", "Q4_0"), "int8", (2,)),
}


@pytest.mark.rotation("case", 3, 1)
@pytest.mark.parametrize("case", DIVIDED)
def test_ranks_with_a_gpu_each_give_the_bits_of_one(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))
    make, cache, sizes = DIVIDED[case]
    model = Path(resolve_model(make(tmp_path)).path)
    expected = bits_of_ranks(model, cache, 1)
    for ranks in sizes:
        assert bits_of_ranks(model, cache, ranks) == expected, ranks


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2: not supported with device cuda; use tensor_par"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "enable_expert_parallel: not supported with dev"),
        ({"tensor_parallel_size": 2, "kv_offload_bytes": 1 << 20}, "= 2: not supported with kv_offload_bytes"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "decode_context_parallel_size = 2: not supported with device cuda; use 1",
        ),
    ],
)
def test_what_ranks_with_gpus_do_not_divide(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = saved("DeepseekV3", tmp_path)
    with pytest.raises(InputError, match=re.escape(reason)):
        LLM(model, tokenizer="stories260k", device="cuda", **options)
