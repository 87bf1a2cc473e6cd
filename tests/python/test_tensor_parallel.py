"""Tensor parallelism: the bits of one process, with each rank's part of weights and cache; ranks that are lost."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import tiny_multimodal
import torch
from divided_models import FOUR, assert_same_bits, blocks, compute, gguf_file, quantized, saved
from serve_command import SMALL, serving
from test_mxfp4_experts import as_mxfp4
from tiny_checkpoints import write_checkpoint

import kvanta
from kvanta import LLM, InputError
from kvanta.engine import nccl


def scale_file(folder: Path, kv_heads: int = 4) -> Path:
    """Scales, means and outliers that differ between KV heads."""
    path = saved("Llama", folder / "model", num_key_value_heads=kv_heads)
    heads = {
        "k_scale": [0.5, 0.25, 2.0, 1.0][:kv_heads],
        "v_scale": [1.0, 4.0, 0.5, 0.125][:kv_heads],
        "k_mean": np.random.default_rng(1).normal(size=(kv_heads, 32)).round(3).tolist(),
        "k_outliers": [[0, 3], [1, 2], [5, 15], [7, 8]][:kv_heads],
    }
    scales = {
        "kvanta_kv_scales": 1,
        "model": {
            "architecture": "LlamaForCausalLM",
            "layers": tiny_models.LAYERS,
            "kv_heads": kv_heads,
            "head_dim": 32,
        },
        "granularity": "head",
        "layers": {str(layer): heads for layer in range(int(tiny_models.LAYERS))},
    }
    (folder / "scales.json").write_text(json.dumps(scales))
    return path


def with_tokenizer(folder: Path) -> Path:
    """For the calibration of keys, which is made when the model is loaded."""
    saved("Llama", folder, vocab_size=512)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(kvanta.__file__).parent / "shipped" / "stories260k" / name, folder)
    return folder


def mxfp4_experts(folder: Path) -> Path:
    model = tiny_models.make_model("GptOss", **FOUR, intermediate_size=96)
    tiny_models.save(model, folder, torch.bfloat16)
    as_mxfp4(folder, model)
    return folder


def mistral_large4(folder: Path) -> Path:
    model = tiny_multimodal.make_mistral_large4(**FOUR | {"num_key_value_heads": 8})
    tiny_models.save(model, folder, torch.bfloat16)
    return folder


# Each: a checkpoint, and options. Together all kinds of weights and of caches that ranks divide.
CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "Llama": (lambda folder: saved("Llama", folder), {"kv_cache_dtype": "int4+hadamard"}),
    "Qwen2": (lambda folder: saved("Qwen2", folder), {"weight_dtype": "int8", "kv_cache_dtype": "kivi4"}),
    "Qwen3": (lambda folder: saved("Qwen3", folder, tie_word_embeddings=True), {"kv_cache_dtype": "int8"}),
    "Phi3": (lambda folder: saved("Phi3", folder), {"weight_dtype": "int4", "kv_cache_dtype": "t4"}),
    "Gemma2": (lambda folder: saved("Gemma2", folder), {"dtype": "float32", "kv_cache_dtype": "k=int8,v=int4"}),
    "Gemma3": (lambda folder: saved("Gemma3", folder), {"kv_cache_dtype": "kivi2"}),
    "Q8_0": (lambda folder: blocks(folder, "Q8_0"), {}),
    "Q4_K": (lambda folder: blocks(folder, "Q4_K"), {"kv_cache_dtype": "int4"}),
    "AWQ": (lambda folder: quantized(folder, "awq"), {}),
    "FP8": (lambda folder: quantized(folder, "ct_fp8_channel"), {"kv_cache_dtype": "nvfp4"}),
    "scales": (scale_file, {"kv_cache_dtype": "k=fp8_e4m3+mean+outliers=2,v=fp8_e4m3"}),
    "klt3": (with_tokenizer, {"kv_cache_dtype": "k=klt3,v=int4"}),
    # Fewer KV heads than ranks.
    "one KV head": (lambda folder: saved("Llama", folder, num_key_value_heads=1), {"kv_cache_dtype": "kivi4"}),
    "Phi3 with two": (lambda folder: saved("Phi3", folder, num_key_value_heads=2), {"kv_cache_dtype": "int4"}),
    "InternLM2 with two": (
        lambda folder: saved("InternLM2", folder, num_key_value_heads=2),
        {"weight_dtype": "int8"},
    ),
    "GptOss with two": (lambda folder: saved("GptOss", folder, num_key_value_heads=2), {}),
    "scales of two": (
        lambda folder: scale_file(folder, 2),
        {"kv_cache_dtype": "k=fp8_e4m3+mean+outliers=2,v=fp8_e4m3"},
    ),
    "Nemotron": (lambda folder: saved("Nemotron", folder), {"weight_dtype": "int8"}),
    "GPTNeoX": (lambda folder: saved("GPTNeoX", folder), {"kv_cache_dtype": "int4"}),
    "GPT2": (lambda folder: saved("GPT2", folder), {"weight_dtype": "int8"}),
    "InternLM2": (lambda folder: saved("InternLM2", folder, attention_bias=True), {"kv_cache_dtype": "int8"}),
    "InternLM2 FP8": (lambda folder: quantized(folder, "ct_fp8_channel", "InternLM2"), {}),
    "GraniteSWA": (lambda folder: saved("GraniteSWA", folder), {"weight_dtype": "int8"}),
    "NanoChat": (lambda folder: saved("NanoChat", folder), {"kv_cache_dtype": "int8"}),
    "Phi GGUF": (lambda folder: gguf_file(folder, "Phi", "Q8_0"), {}),
    "DeepseekV3": (lambda folder: saved("DeepseekV3", folder), {"kv_cache_dtype": "mla_int4"}),
    "DeepseekV32": (
        lambda folder: saved("DeepseekV32", folder),
        {"kv_cache_dtype": "mla_int4", "indexer_cache_dtype": "int4"},
    ),
    "MistralLarge4": (mistral_large4, {"kv_cache_dtype": "mla_int8"}),
    "DeepseekV3 GGUF": (lambda folder: gguf_file(folder, "DeepseekV3", "F32"), {}),
}
# Models with experts, which ranks divide in two ways.
EXPERT_CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "Qwen3Moe": (lambda folder: saved("Qwen3Moe", folder), {"kv_cache_dtype": "int4"}),
    "Qwen2Moe": (lambda folder: saved("Qwen2Moe", folder), {"weight_dtype": "int8"}),
    "Mixtral": (lambda folder: saved("Mixtral", folder), {"weight_dtype": "int4", "kv_cache_dtype": "int8"}),
    "GptOss": (lambda folder: saved("GptOss", folder), {}),
    "GptOss MXFP4": (mxfp4_experts, {"kv_cache_dtype": "fp8_e4m3"}),
    "Llama4": (lambda folder: saved("Llama4", folder), {"dtype": "float32"}),
    "GraniteMoeShared": (lambda folder: saved("GraniteMoeShared", folder), {}),
    "Step3p5": (lambda folder: saved("Step3p5", folder), {"kv_cache_dtype": "int8"}),
    "DeepseekV4": (lambda folder: saved("DeepseekV4", folder), {"kv_cache_dtype": "int8"}),
    "DeepseekV4 states": (
        lambda folder: saved("DeepseekV4", folder),
        {"kv_cache_dtype": "int8", "state_cache_dtype": "int8", "state_grid": 64},
    ),
    "Q4_0": (lambda folder: gguf_file(folder, "Qwen3Moe", "Q4_0"), {}),
    "FP8": (lambda folder: quantized(folder, "ct_fp8_channel", "Qwen3Moe"), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_give_the_bits_of_one_process(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))
    make, options = CASES[case]
    model = make(tmp_path)
    if case.startswith("scales"):
        options = {**options, "quantization_param_path": str(tmp_path / "scales.json")}
    expected = compute(model, 1, **options)
    for size in (2, 4):
        assert_same_bits(compute(model, size, tensor_parallel_size=size, **options), expected)


@pytest.mark.parametrize("case", EXPERT_CASES)
def test_ranks_divide_experts(case: str, tmp_path: Path) -> None:
    make, options = EXPERT_CASES[case]
    model = make(tmp_path)
    expected = compute(model, 1, **options)
    for size, by_experts in ((2, False), (4, False), (2, True), (4, True)):
        ranks = {"tensor_parallel_size": size, "enable_expert_parallel": by_experts}
        assert_same_bits(compute(model, size, **ranks, **options), expected)


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [
        (
            {"num_key_value_heads": 3, "num_attention_heads": 3},
            {},
            "the 3 heads and 3 KV heads of LlamaForCausalLM .* 1, 3 do",
        ),
        ({}, {"tensor_parallel_size": 17}, "tensor_parallel_size = 17: must be between 1 and 16"),
        (
            {},
            {"tensor_parallel_size": 3},
            "the 4 heads and 2 KV heads of LlamaForCausalLM do not divide among so many ranks; 1, 2, 4 do",
        ),
        ({}, {"tensor_parallel_size": 0}, "tensor_parallel_size = 0: must be between 1 and 16"),
        ({}, {"kv_cache_dir": "pages"}, "tensor_parallel_size = 2: not supported with kv_cache_dir"),
        ({}, {"kv_store": "redis://127.0.0.1:1"}, "tensor_parallel_size = 2: not supported with kv_store"),
        ({}, {"quality_sample_rate": 0.5}, "not supported with quality_sample_rate"),
        ({}, {"calculate_kv_scales": True}, "not supported with calculate_kv_scales"),
    ],
)
def test_what_ranks_cannot_divide_is_refused(
    settings: dict[str, Any], options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "model", **settings)
    with pytest.raises(InputError, match=reason):
        LLM(model, **{"tensor_parallel_size": 2, **options})


@pytest.mark.parametrize(
    ("architecture", "settings"), [("Qwen3_5", {}), ("Olmo2", {}), ("Cohere", {"use_qk_norm": True})]
)
def test_architectures_without_a_division_are_refused(
    architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    tiny_models.save(tiny_models.make_model(architecture, **settings), tmp_path, torch.bfloat16)
    with pytest.raises(InputError, match="not divided among ranks yet; use 1, or pipeline_parallel_size"):
        LLM(tmp_path, tokenizer="stories260k", tensor_parallel_size=2)


def test_each_rank_needs_an_expert(tmp_path: Path) -> None:
    model = saved("Mixtral", tmp_path, num_attention_heads=8, num_key_value_heads=8)
    reason = "enable_expert_parallel would leave ranks without one of the 6 experts of MixtralForCausalLM"
    with pytest.raises(InputError, match=reason):
        LLM(model, tokenizer="stories260k", tensor_parallel_size=8, enable_expert_parallel=True)


def test_each_rank_has_its_part_of_weights_and_cache() -> None:
    whole = LLM("stories260k", threads=1, kv_cache_memory_bytes=1 << 22)
    part = LLM("stories260k", threads=1, kv_cache_memory_bytes=1 << 22, tensor_parallel_size=2)
    assert part.stats()["weight_bytes"] <= 0.55 * whole.stats()["weight_bytes"]
    page, whole_page = (llm.stats()["groups"][0]["page_bytes"] for llm in (part, whole))
    assert 2 * page == whole_page


def test_ranks_end_with_their_parent() -> None:
    script = (
        "import kvanta, time; llm = kvanta.LLM('stories260k', tensor_parallel_size=2, threads=1);"
        "print(llm._loaded._ranks.processes[0].pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


def test_a_server_ends_with_a_rank() -> None:
    log: list[str] = []
    with serving("stories260k", *SMALL, "-tp", "2", log=log) as (process, client):
        assert client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 4}).status_code == 200
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        assert process.wait(120) == 1
    assert any("ERROR rank 1 of 2 is lost: its process was ended by SIGKILL" in line for line in log)


def test_nccl_of_a_python_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    importlib.invalidate_caches()
    assert nccl.nccl_library() != str(library)
    library.touch()
    assert nccl.nccl_library() == str(library)
    nccl.load(str(library))  # no library: left to the engine, which says so


def test_ranks_load_the_nccl_of_a_python_package() -> None:
    build = Path(__file__).resolve().parents[2] / os.environ.get("KVANTA_BUILD", "build/release")
    library = build / "tests" / "libfake_nccl.so"
    if not library.is_file():
        pytest.skip(f"{library} is not built; scripts/test builds it")
    order = json.dumps({"config": {"rank": 1}, "cpus": [], "nccl": str(library)})
    script = Path(kvanta.__file__).with_name("engine") / "rank_process.py"
    with subprocess.Popen(
        [sys.executable, "-IS", str(script)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LD_DEBUG": "files"},
    ) as rank:
        assert rank.stdin is not None
        assert rank.stderr is not None
        rank.stdin.write(order + "\n")
        rank.stdin.flush()  # open: a rank ends with its parent
        loaded = rank.stderr.read()
    assert f"calling init: {library}" in loaded
    assert rank.returncode == 1, "it has no model"
