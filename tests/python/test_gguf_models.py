"""GGUF files used in place: the logits of transformers on the checkpoint that they were made of."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import gguf_dense
import gguf_gemma4
import gguf_kimi
import gguf_lfm2
import gguf_mamba2
import gguf_models
import numpy as np
import pytest
import tiny_models
import tolerance
from gguf_models import Kind
from gguf_moe_models import LATENTS, MODELS_WITH_EXPERTS
from model_support import RecordSupport
from tiny_gguf import rewrite

from kvanta import LLM, InputError, _core
from kvanta.checkpoint.resolve import resolve_model
from kvanta.gguf.convert import index_gguf

TOKENS = np.random.default_rng(3).integers(3, gguf_models.VOCAB, 150).astype(np.int32)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MINISTRAL3_ROPE = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
GATED_DELTA_NET = tiny_models.GATED_DELTA_NET | {
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
HYBRID_EXPERTS = GATED_DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_256": ("Llama", {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}),
    "llama_biases": ("Llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama_yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": (
        "Gemma3",
        GEMMA | {"num_hidden_layers": 6, "sliding_window_pattern": 6, "rope_parameters": GEMMA3_ROPES},
    ),
    "deepseek_v2": ("DeepseekV2", LATENTS),
    "deepseek_v2_lite": ("DeepseekV2", LATENTS | {"q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3", LATENTS | {"n_group": 4, "topk_group": 2}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 64, "norm_topk_prob": False}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "qwen3_next": ("Qwen3Next", HYBRID_EXPERTS),
    "qwen3_5": ("Qwen3_5", GATED_DELTA_NET),
    "qwen3_5_interval": (
        "Qwen3_5",
        GATED_DELTA_NET
        | {
            "layer_types": None,
            "linear_num_value_heads": 6,
            "linear_value_head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    ),
    "qwen3_5_moe": ("Qwen3_5Moe", HYBRID_EXPERTS),
    "youtu": ("Youtu", {key: LATENTS[key] for key in tiny_models.DENSE_LATENTS}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "seed_oss": ("SeedOss", {"head_dim": 32, "pad_token_id": 0}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 32}),
    "exaone4": ("Exaone4", {"num_hidden_layers": 4, "sliding_window": 24}),
    "exaone4_no_window": (
        "Exaone4",
        {"num_hidden_layers": 2, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 32}),
    "command_r": ("Cohere", {"num_attention_heads": 2, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {"num_attention_heads": 2}),
    "arcee": ("Arcee", {}),
    "stablelm": ("StableLm", {"num_attention_heads": 2, "use_qkv_bias": True}),
    "stablelm_parallel": ("StableLm", {"num_attention_heads": 2, "use_parallel_residual": True}),
    "nemotron": ("Nemotron", {"head_dim": 32, "mlp_bias": True}),
    "phi3": ("Phi3", {"pad_token_id": 0, "original_max_position_embeddings": 256}),
    "glm4": ("Glm4", {"head_dim": 32, "attention_bias": True, "pad_token_id": 0}),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.7,
            "pad_token_id": 0,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            # As in all published models, for the file does not say them.
            "attention_chunk_size": 8192,
            "no_rope_layer_interval": 4,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "pad_token_id": 0,
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 24}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "pad_token_id": 0}),
    "ministral3": ("Ministral3", {"head_dim": 32, "pad_token_id": 0, "rope_parameters": MINISTRAL3_ROPE}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "rope_parameters": YARN | {"rope_theta": 150000.0, "truncate": False},
        },
    ),
    **gguf_dense.MODELS,
    **MODELS_WITH_EXPERTS,
    **gguf_gemma4.MODELS,
    **gguf_lfm2.MODELS,
    **gguf_mamba2.MODELS,
    **gguf_kimi.MODELS,
}


def logits(model: Path, **options: Any) -> Any:
    options = {"max_model_len": 256, "threads": 2, "kv_cache_memory_bytes": "64MiB", **options}
    return LLM(model, **options).logits(TOKENS)


def rms(values: Any) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.mean(values**2)))


def float32_error(model: Path, source: gguf_models.Source) -> float:
    """Largest difference to transformers in float32, relative to the largest logit."""
    expected = gguf_models.expected_logits(source, TOKENS)
    found = logits(model, dtype="float32", kv_cache_dtype="fp32")
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def make(tmp_path: Path, model: str, kind: Kind = Kind.F32, **kinds: Kind) -> tuple[Path, gguf_models.Source]:
    architecture, settings = MODELS[model]
    source = gguf_models.make_source(tmp_path / "source", architecture, **settings)
    try:
        _core.read_model_info(str(source.folder))
    except InputError as error:
        if "unknown architecture" in str(error):
            pytest.skip(f"{architecture} is not supported")
        raise
    return gguf_models.write(source, tmp_path / "m.gguf", kind, kinds), source


@pytest.mark.rotation("model", 2, "kind")
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("model", MODELS)
def test_float32_logits_equal_transformers(
    model: str, kind: str, tmp_path: Path, record_support: RecordSupport
) -> None:
    file, source = make(tmp_path, model, gguf.GGMLQuantizationType[kind])
    assert float32_error(file, source) < tolerance.F32_LOGITS
    record_support(file, f"GGUF {kind}")


@pytest.mark.parametrize(
    ("model", "arch"),
    [
        ("qwen2", "QWEN2VL"),
        ("qwen3", "QWEN3VL"),
        ("qwen3_moe", "QWEN3VLMOE"),
        ("llama", "INTERNLM2"),
        ("granite", "MINICPM"),
    ],
)
def test_architectures_of_another_class(model: str, arch: str, tmp_path: Path) -> None:
    """Qwen-VL: a file has the language model alone. InternLM2 and MiniCPM: the arithmetic of Llama and Granite."""
    architecture, settings = MODELS[model]
    if arch == "MINICPM":  # its attention has no factor of its own
        settings = settings | {"attention_multiplier": 0.25}
    source = gguf_models.make_source(tmp_path / "source", architecture, **settings)
    source.other_arch = arch
    assert float32_error(gguf_models.write(source, tmp_path / "m.gguf"), source) < tolerance.F32_LOGITS


@pytest.mark.parametrize("model", ["llama_biases", "qwen2", "gemma2", "starcoder2", "phi", "glm"])
def test_q_k_and_v_in_one_matrix(model: str, tmp_path: Path) -> None:
    """Files of every architecture may have them, as llama.cpp reads them."""
    architecture, settings = MODELS[model]
    source = gguf_models.make_source(tmp_path / "source", architecture, **settings)
    source.fuses_qkv = True
    file = gguf_models.write(source, tmp_path / "m.gguf")
    assert "blk.0.attn_qkv.weight" in {tensor.name for tensor in gguf.GGUFReader(file).tensors}
    assert float32_error(file, source) < tolerance.F32_LOGITS


# NVFP4 also has scales of whole tensors, which no architecture here has names for.
@pytest.mark.parametrize("kind", [kind for kind in _core.gguf_types() if kind not in ("F32", "NVFP4")])
def test_types_of_tensors(kind: str, tmp_path: Path, record_support: RecordSupport) -> None:
    file, source = make(tmp_path, "llama_256", gguf.GGMLQuantizationType[kind])
    assert kind in written_types(file)
    assert float32_error(file, source) < tolerance.F32_LOGITS
    record_support(file, f"GGUF {kind}")


@pytest.mark.rotation("model", 3, 0)
@pytest.mark.parametrize("model", MODELS)
def test_blocks_of_4_bits(model: str, tmp_path: Path, record_support: RecordSupport) -> None:
    """Kept and multiplied in every architecture's layers: Q4_0, and GPT-OSS's experts in MXFP4."""
    architecture, settings = MODELS[model]
    # Every row goes to all experts: rounding must not choose others.
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    count = next((settings[name] for name in names if name in settings), 0)
    of_a_row = dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_k"), count)
    if architecture == "HunYuanMoEV1":
        of_a_row = {"moe_topk": count}
    elif architecture == "Phimoe":  # which always takes two
        of_a_row = {"num_local_experts": 2}
    groups = of_a_row | {"n_group": 1, "topk_group": 1} if count else {}
    source = gguf_models.make_source(tmp_path / "source", architecture, **settings | groups)
    kinds = {"experts": Kind.MXFP4} if model == "gpt_oss" else {}
    file = gguf_models.write(source, tmp_path / "m.gguf", Kind.Q4_0, kinds)
    assert float32_error(file, source) < tolerance.F32_LOGITS
    exact = gguf_models.expected_logits(source, TOKENS)
    found, rounded = logits(file), logits(file, weight_dtype="bf16")
    assert 0 < rms(found - exact) < 2 * rms(rounded - exact) + 0.005 * exact.std()
    for kind in written_types(file) - {"F32"}:
        record_support(file, f"GGUF {kind}")


def test_types_that_are_not_read_are_converted(tmp_path: Path) -> None:
    file, source = make(tmp_path, "llama_256", Kind.Q8_0, q_proj=Kind.TQ2_0, o_proj=Kind.TQ1_0)
    index = json.loads((resolve_model(file).path / "model.gguf.index.json").read_text())
    assert index["tensors"]["model.layers.0.self_attn.k_proj.weight"]["type"] == "Q8_0"
    assert "model.layers.0.self_attn.q_proj.weight" not in index["tensors"]
    assert index["converted"] == "converted.safetensors"
    assert float32_error(file, source) < 0.02  # converted tensors are rounded to bf16


def test_rope_factors_of_step35(tmp_path: Path) -> None:
    """llama.cpp has the factors of whole heads' frequencies, of which full attention rotates half."""
    theta = 5e6
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    name, settings = MODELS["step35"]
    source = gguf_models.make_source(tmp_path / "source", name, **settings | {"rope_parameters": ropes})
    file = gguf_models.write(source, tmp_path / "m.gguf")
    wavelength = 2 * np.pi * theta ** (np.arange(0, 32, 2) / 32)
    smooth = np.clip((131072 / wavelength - 1) / 31, 0, 1)
    architecture = {"general.architecture": "step35"}
    rewrite(file, architecture, {"rope_freqs.weight": (1 / ((1 - smooth) / 2 + smooth)).astype(np.float32)})
    rope = json.loads((resolve_model(file).path / "config.json").read_text())["rope_parameters"]
    assert rope["full_attention"] == {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
        "original_max_position_embeddings": 131072,
        "rope_theta": theta,
        "partial_rotary_factor": 0.5,
    }
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert np.isfinite(logits(file)).all()


def written_types(file: Path) -> set[str]:
    return {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q3_K", "IQ4_XS", "mixed"])
def test_blocks_are_kept_and_used(kind: str, tmp_path: Path) -> None:
    kinds = {"v_proj": Kind.Q6_K, "down_proj": Kind.Q5_0, "embed": Kind.Q8_0} if kind == "mixed" else {}
    kind = "Q4_K" if kind == "mixed" else kind
    file, source = make(tmp_path, "llama_256", gguf.GGMLQuantizationType[kind], **kinds)
    exact = gguf_models.expected_logits(source, TOKENS)
    llm = LLM(file, max_model_len=256, threads=2, kv_cache_memory_bytes="64MiB")
    found = llm.logits(TOKENS)
    # Activations of 8 and 16 bits, and the cache of bf16, are all that may differ: as far as bf16 weights and
    # activations do, which depends on the model. Measured: up to 1.3 times as far.
    rounded = logits(file, weight_dtype="bf16")
    assert 0 < rms(found - exact) < 2 * rms(rounded - exact) + 0.005 * exact.std()
    if kind == "Q8_0":
        np.testing.assert_array_equal(found, logits(file, weight_dtype="int8"))
    stored = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors)
    assert stored <= llm.stats()["weight_bytes"] < 1.15 * stored, "panels are padded, and some sub-scales unpacked"
    assert llm.config.weight_dtype == "auto"
    assert abs(_core.read_model_info(str(resolve_model(file).path)).weight_bytes - stored) < 0.03 * stored


@pytest.mark.parametrize("weight_dtype", ["bf16", "int8", "int4"])
def test_other_storages_of_weights(weight_dtype: str, tmp_path: Path) -> None:
    file, source = make(tmp_path, "qwen3", Kind.Q8_0)
    exact = gguf_models.expected_logits(source, TOKENS)
    found = logits(file, weight_dtype=weight_dtype)
    bound = {"bf16": 0.05, "int8": 0.05, "int4": 0.5}[weight_dtype]
    assert rms(found - exact) < bound * exact.std()


def test_nothing_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = make(tmp_path, "llama", Kind.Q8_0)
    folder = resolve_model(file).path
    assert sorted(entry.name for entry in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.gguf.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]
    # The next start does not read the file's header again.
    monkeypatch.setattr("kvanta.gguf.convert.index_gguf", lambda *_: pytest.fail("indexed twice"))
    assert resolve_model(str(file)).path == folder
    os.utime(file, ns=(1, 1))
    with pytest.raises(pytest.fail.Exception):
        resolve_model(file)


def test_a_file_that_has_changed(tmp_path: Path) -> None:
    file, _ = make(tmp_path, "llama")
    folder = index_gguf(file, tmp_path / "folder")
    logits(folder)
    os.utime(file, ns=(1, 1))
    with pytest.raises(InputError, match=r"m\.gguf: changed since .*model\.gguf\.index\.json was written"):
        logits(folder)
    logits(file)  # indexed again
    file.unlink()
    with pytest.raises(InputError, match=r"m\.gguf: cannot open: No such file"):
        logits(folder)


def test_scales_that_are_not_finite(tmp_path: Path) -> None:
    file, _ = make(tmp_path, "llama", Kind.Q8_0)
    tensor = next(t for t in gguf.GGUFReader(file).tensors if t.name == "blk.1.attn_q.weight")
    data = bytearray(file.read_bytes())
    at = int(tensor.data_offset)
    data[at : at + 2] = np.array([np.inf], "<f2").tobytes()
    file.write_bytes(data)
    for options in ({}, {"dtype": "float32"}, {"weight_dtype": "int4"}):
        with pytest.raises(InputError, match=r"model\.layers\.1\.self_attn\.q_proj.*(not finite|is infinite|is NaN)"):
            logits(file, **options)


@pytest.mark.parametrize("count", [4, 16])
@pytest.mark.parametrize(("model", "architecture"), [("qwen3_moe", "qwen3moe"), ("gpt_oss", "gpt-oss")])
def test_a_number_of_experts_that_does_not_fit(model: str, architecture: str, count: int, tmp_path: Path) -> None:
    file, _ = make(tmp_path, model)
    rewrite(file, {"general.architecture": architecture, f"{architecture}.expert_count": count})
    with pytest.raises(InputError, match=rf"m\.gguf: tensor 'blk\.0\.\S+' has shape \(8, .*, not \({count}, "):
        logits(file)


# --- split files


def split(file: Path, sizes: list[int]) -> list[Path]:
    """The file in parts with so many tensors each, as llama.cpp's gguf-split writes it."""
    reader = gguf.GGUFReader(file)
    architecture = str(reader.fields["general.architecture"].contents())
    begin, paths = 0, []
    for number, size in enumerate(sizes):
        path = file.with_name(f"{file.stem}-{number + 1:05}-of-{len(sizes):05}.gguf")
        writer = gguf.GGUFWriter(path, architecture)
        for name, value in reader.fields.items():
            if number == 0 and not name.startswith("GGUF.") and name != "general.architecture":
                sub = value.types[-1] if value.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, value.contents(), value.types[0], sub_type=sub)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", len(sizes))
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[begin : begin + size]:
            writer.add_tensor(tensor.name, tensor.data.copy(), raw_dtype=tensor.tensor_type)
        begin += size
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    assert begin >= len(reader.tensors)
    return paths


def test_split_files(tmp_path: Path) -> None:
    file, source = make(tmp_path, "llama", Kind.Q8_0)
    parts = split(file, [0, 5, 100])
    assert float32_error(parts[1], source) < tolerance.F32_LOGITS
    assert resolve_model(parts[0]).path == resolve_model(parts[2]).path
    assert resolve_model(parts[0]).path.name.startswith("m-")

    (tmp_path / "alone.gguf").write_bytes(parts[1].read_bytes())
    with pytest.raises(InputError, match=r"alone\.gguf is one of 3 parts, but its name does not end"):
        resolve_model(tmp_path / "alone.gguf")
    first, second = (path.read_bytes() for path in parts[1:])
    parts[1].write_bytes(second)
    parts[2].write_bytes(first)
    with pytest.raises(InputError, match=r"by its name part 1 of 3, by its keys part 2 of 3"):
        resolve_model(parts[0])
    parts[1].unlink()
    with pytest.raises(InputError, match=r"a part of 3, of which 'm-00002-of-00003\.gguf' is missing in"):
        resolve_model(parts[2])
