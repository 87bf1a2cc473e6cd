"""Checkpoints of transformers as GGUF files, as llama.cpp's convert_hf_to_gguf.py writes them.

Names are those of the gguf package's own table; the transformations (order of rows, norms plus one, stacked experts,
split projections of latents) are written here again, from that script; those of hybrids in gguf_hybrids.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import gguf_dense
import gguf_gemma4
import gguf_hybrids
import gguf_kimi
import gguf_lfm2
import gguf_mamba2
import numpy as np
import safetensors.numpy
import tiny_models
import torch
from gguf_keys import add_config
from numpy.typing import NDArray
from tiny_gguf import interleave, write_tokenizer

Array = NDArray[np.float32]
Kind = gguf.GGMLQuantizationType
VOCAB = 300

ARCHITECTURES = {
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "mixtral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen2_moe": "QWEN2MOE",
    "qwen3_moe": "QWEN3MOE",
    "qwen3_next": "QWEN3NEXT",
    "qwen3_5_text": "QWEN35",
    "qwen3_5_moe_text": "QWEN35MOE",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2MOE",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
    "gemma4_text": "GEMMA4",
    "gemma": "GEMMA",
    "cohere": "COMMAND_R",
    "cohere2": "COHERE2",
    "arcee": "ARCEE",
    "nemotron": "NEMOTRON",
    "stablelm": "STABLELM",
    "seed_oss": "SEED_OSS",
    "ernie4_5": "ERNIE4_5",
    "exaone4": "EXAONE4",
    "hunyuan_v1_dense": "HUNYUAN_DENSE",
    "youtu": "DEEPSEEK2",
    "gpt_oss": "GPT_OSS",
    "llama4_text": "LLAMA4",
    "phi3": "PHI3",
    "deepseek_v2": "DEEPSEEK2",
    "deepseek_v3": "DEEPSEEK2",
    "deepseek_v32": "GLM_DSA",  # by another name
    "glm_moe_dsa": "GLM_DSA",
    "ministral3": "MISTRAL3",
    "glm4": "GLM4",
    "glm4_moe": "GLM4_MOE",
    "glm4_moe_lite": "DEEPSEEK2",
    "afmoe": "AFMOE",
    "hunyuan_v1_moe": "HUNYUAN_MOE",
    "mimo_v2_flash": "MIMO2",
    "mistral4": "MISTRAL4",
    "phimoe": "PHIMOE",
    "step3p5": "STEP35",
    "minimax_m2": "MINIMAXM2",
    "ernie4_5_moe": "ERNIE4_5_MOE",
    "olmoe": "OLMOE",
    "granitemoe": "GRANITE_MOE",
    "granitemoeshared": "GRANITE_MOE",
    "dots1": "DOTS1",
    "exaone_moe": "EXAONE_MOE",
    "granite": "GRANITE",
    "granitemoehybrid": "GRANITE_HYBRID",
    "falcon_h1": "FALCON_H1",
    "nemotron_h": "NEMOTRON_H",
    "bamba": "GRANITE_HYBRID",
    "kimi_linear": "KIMI_LINEAR",
    "olmo2": "OLMO2",
    "olmo3": "OLMO2",
    "smollm3": "SMOLLM3",
    **gguf_dense.ARCHITECTURES,
}
_NORMS_PLUS_ONE = {
    *("gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron"),
    "step3p5",
}
_PAIRED_ROPE = {"LLAMA", "GRANITE", "GRANITE_MOE", "SMOLLM3", "MISTRAL3", "ARCEE"} | gguf_dense.PAIRED_ROPE
_GRANITE_WITH_EXPERTS = {"GRANITE_MOE", "GRANITE_HYBRID"}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass
class Source:
    """A saved checkpoint: its config.json, and its tensors by the hub's names."""

    folder: Path
    other_arch: str = ""
    """Replacement for the one that ARCHITECTURES has."""
    fuses_qkv: bool = False
    """The file has q, k and v of a layer in one matrix; its values are not rounded."""
    config: dict[str, Any] = field(init=False)
    tensors: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        self.config = json.loads((self.folder / "config.json").read_text())
        self.config = gguf_dense.common_config(self.config)
        if "layers_block_type" in self.config:
            self.config["num_hidden_layers"] = len(self.config["layers_block_type"])
        self.config = gguf_kimi.with_common_names(self.config)
        self.tensors = {
            name: values.copy()
            for name, values in safetensors.numpy.load_file(self.folder / "model.safetensors").items()
        }

    @property
    def arch(self) -> str:
        if "moe" in self.config.get("layers_block_type", []):
            return "NEMOTRON_H_MOE"
        return self.other_arch or ARCHITECTURES[self.config["model_type"]]


# Offsets of the fp16 scales in blocks that the gguf package reads and does not write.
_SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def _random_blocks(values: Array, kind: Kind) -> NDArray[np.uint8]:
    """Blocks of random codes whose values are as large as `values`."""
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(values.size)
    blocks = random.integers(0, 256, (values.size // per_block, size), dtype=np.uint8)
    shares = random.uniform(0.5, 1, (len(blocks), 1))
    scale = 1e-2
    for _ in range(2):  # the second time with the scale that gives the size
        for at in _SCALES[kind.name]:
            blocks[:, at : at + 2] = (shares * scale).astype("<f2").view(np.uint8)
        scale *= values.std() / gguf.dequantize(blocks, kind).std()
    return blocks.reshape(*values.shape[:-1], -1)


def encode(values: Array, kind: Kind) -> NDArray[Any]:
    """The values in blocks; random blocks of their size for kinds that the gguf package does not write."""
    try:
        return np.asarray(gguf.quantize(np.ascontiguousarray(values), kind))
    except NotImplementedError:
        return _random_blocks(values, kind)


def _parts(source: Source) -> dict[str, Array]:
    """Tensors by names that the gguf package's table knows, in GGUF's shapes; rows in the order of the checkpoint."""
    config, stacks, parts = source.config, dict[str, dict[int, Array]](), dict[str, Array]()
    for name, values in source.tensors.items():
        expert = _EXPERT.fullmatch(name)
        if source.arch == "GEMMA4":
            parts[gguf_gemma4.part_name(name)] = values
        elif expert:
            stacks.setdefault(f"{expert[1]}.{expert[3]}.{expert[4]}", {})[int(expert[2])] = values
        elif (of_dense := gguf_dense.parts(config, name, values)) is not None:
            parts.update(of_dense)
        elif short_conv := gguf_lfm2.part(name, values):
            parts[short_conv[0]] = short_conv[1]
        elif (of_mamba2 := gguf_mamba2.parts(config, name, values)) is not None:
            parts.update(of_mamba2)
        elif (of_kimi := gguf_kimi.parts(name, values)) is not None:
            parts.update(of_kimi)
        elif gguf_hybrids.MODULE in name:
            parts.update(gguf_hybrids.parts(config, name, values))
        elif name.endswith("kv_b_proj.weight"):
            heads, nope, value = (config[k] for k in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
            both = values.reshape(heads, nope + value, -1)
            parts[name.replace("kv_b_proj", "k_b_proj")] = np.ascontiguousarray(both[:, :nope].swapaxes(1, 2))
            parts[name.replace("kv_b_proj", "v_b_proj")] = np.ascontiguousarray(both[:, nope:])
        elif name.endswith("input_linear.weight"):  # gate, then up
            for part, matrix in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
                parts[_granite_part(name, part)] = np.ascontiguousarray(matrix)
        elif name.endswith("output_linear.weight"):
            parts[_granite_part(name, "down")] = values
        elif name.endswith(".experts.gate_up_proj"):
            both = _inputs_first(source, values)
            for part in ("gate", "up"):
                matrix = both[:, :, _columns(source, part, both.shape[-1])].swapaxes(1, 2)
                parts[name.replace("gate_up_proj", f"{part}_proj.weight")] = np.ascontiguousarray(matrix)
        elif name.endswith(".experts.gate_up_proj_bias"):
            parts[name.replace("gate_up_proj_bias", "gate_proj.bias")] = np.ascontiguousarray(values[:, ::2])
            parts[name.replace("gate_up_proj_bias", "up_proj.bias")] = np.ascontiguousarray(values[:, 1::2])
        elif name.endswith(".experts.down_proj"):
            parts[f"{name}.weight"] = np.ascontiguousarray(_inputs_first(source, values).swapaxes(1, 2))
        elif name.endswith(".experts.down_proj_bias"):
            parts[name.replace("_bias", ".bias")] = values
        elif name.endswith((".sinks", ".attention_sink_bias")):
            parts[f"{name}.weight"] = values
        elif name.endswith(("e_score_correction_bias", "mlp.expert_bias")):
            parts[name.replace("_bias", ".bias")] = values.reshape(-1)
        elif name.endswith("moe.router_bias"):
            parts[f"{name}.bias"] = values
        elif name.startswith(("vision_model.", "vit_")):
            pass  # of Step 3.7, whose language model is written
        elif name.endswith("shared_expert_gate.weight"):
            parts[name] = values.reshape(-1)
        else:
            parts[name] = values
    for name, experts in stacks.items():
        parts[name] = np.stack([experts[i] for i in range(len(experts))])
    return parts


def _granite_part(name: str, part: str) -> str:
    """GGUF's part of a tensor of Granite's experts, or of the shared one, by a name of the table."""
    layer = name.partition(".block_sparse_moe.")[0].partition(".shared_mlp.")[0]
    module = "block_sparse_moe.experts" if ".block_sparse_moe." in name else "shared_mlp"
    return f"{layer}.{module}.{part}_proj.weight"


def _back(source: Source, name: str, values: Array) -> None:
    """Puts a part's values into the checkpoint's tensors."""
    if gguf_mamba2.is_kept(name) or gguf_hybrids.back(source.config, source.tensors, name, values):
        return
    if gguf_lfm2.back(source.tensors, name, values) or gguf_dense.back(source.config, source.tensors, name, values):
        return
    name = name if source.arch != "GEMMA4" else gguf_gemma4.tensor_name(source.tensors, name)
    if name in source.tensors:
        source.tensors[name] = values.reshape(source.tensors[name].shape)
        return
    experts = re.fullmatch(r"(.+\.experts)\.(\w+\.\w+)", name)
    granite = re.fullmatch(r"(.+)\.(block_sparse_moe\.experts|shared_mlp)\.(\w+)_proj\.weight", name)
    if granite and source.arch in _GRANITE_WITH_EXPERTS:
        module = f"{granite[1]}.{granite[2].removesuffix('.experts')}"
        if granite[3] == "down":
            source.tensors[f"{module}.output_linear.weight"][:] = values
        else:
            halves = np.split(source.tensors[f"{module}.input_linear.weight"], 2, axis=-2)  # views
            halves[0 if granite[3] == "gate" else 1][:] = values
    elif experts and f"{experts[1]}.gate_up_proj" in source.tensors:
        _back_fused(source, experts[1], experts[2], values)
    elif experts:
        for i, expert in enumerate(values):
            source.tensors[f"{experts[1]}.{i}.{experts[2]}"] = np.ascontiguousarray(expert)
    elif "k_b_proj" in name or "v_b_proj" in name:
        whole = re.sub("[kv]_b_proj", "kv_b_proj", name)
        heads, nope = source.config["num_attention_heads"], source.config["qk_nope_head_dim"]
        both = source.tensors[whole].reshape(heads, -1, source.config["kv_lora_rank"])
        if "k_b_proj" in name:
            both[:, :nope] = values.swapaxes(1, 2)
        else:
            both[:, nope:] = values


def _inputs_first(source: Source, experts: Array) -> Array:
    """A view [experts][in][out] of a tensor of all experts."""
    return experts.swapaxes(1, 2) if source.config["model_type"] == "mistral4" else experts


def _columns(source: Source, part: str, width: int) -> slice:
    """Gate or up in a matrix of both: one after the other, in turns in GPT-OSS."""
    if source.config["model_type"] == "gpt_oss":
        return slice(0 if part == "gate" else 1, None, 2)
    return slice(0, width // 2) if part == "gate" else slice(width // 2, None)


def _back_fused(source: Source, experts: str, part: str, values: Array) -> None:
    """Experts in one tensor; biases are not rounded."""
    if part == "down_proj.weight":
        _inputs_first(source, source.tensors[f"{experts}.down_proj"])[:] = values.swapaxes(1, 2)
    elif part.endswith(".weight"):
        both = _inputs_first(source, source.tensors[f"{experts}.gate_up_proj"])
        both[:, :, _columns(source, part.partition("_")[0], both.shape[-1])] = values.swapaxes(1, 2)


def _expert_names(source: Source, name: str) -> str:
    """Names under which the table has the experts of Mixtral, and the parts of Granite's."""
    if source.config["model_type"] in ("bamba", "nemotron_h", "kimi_linear"):
        name = re.sub(r"backbone\.(layers\.\d+)\.mixer\.experts", r"model.\1.mlp.experts", gguf_kimi.table_name(name))
        name = name.replace("model.final_layernorm", "model.norm")
    elif source.arch in _GRANITE_WITH_EXPERTS:
        if source.config["num_local_experts"] == 0:
            return name.replace("shared_mlp", "mlp")
        return name.replace("block_sparse_moe.experts", "mlp.experts").replace("shared_mlp", "mlp.shared_experts")
    return re.sub(
        r"model\.(layers\.\d+)\.(block_sparse_moe|feed_forward)\.experts\.w", r"\1.feed_forward.experts.w", name
    )


def _head_count(source: Source, name: str) -> int:
    if source.arch not in _PAIRED_ROPE and source.config["model_type"] != "bamba":
        return 0
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    return int(source.config[heads]) if heads else 0


def write(source: Source, path: Path, kind: Kind = Kind.F32, kinds: dict[str, Kind] | None = None) -> Path:
    """Writes the file; matrices as `kind`, or as `kinds` says for a part of their name.

    The checkpoint's tensors become the rounded values, in its folder as well.
    """
    arch = gguf.MODEL_ARCH[source.arch]
    is_deepseek32 = source.config["model_type"] == "deepseek_v32"
    writer = gguf.GGUFWriter(path, "deepseek32" if is_deepseek32 else gguf.MODEL_ARCH_NAMES[arch])
    add_config(writer, source.config, source.arch)
    gguf_dense.add_config(writer, source.config, source.tensors)
    write_tokenizer(writer, source.config["vocab_size"])
    names = gguf.get_tensor_name_map(arch, source.config["num_hidden_layers"])
    plus_one = source.config["model_type"] in _NORMS_PLUS_ONE
    parts = _parts(source)
    if source.fuses_qkv:
        parts = gguf_dense.fused(source.config, parts, source.arch in _PAIRED_ROPE)
    for name, values in parts.items():
        if name.startswith("blk."):
            writer.add_tensor(name, values)
            continue
        target = gguf_gemma4.target(name) or names.get_name(
            _expert_names(source, name), try_suffixes=(".weight", ".bias")
        )
        assert target is not None, name
        chosen = next((value for part, value in (kinds or {}).items() if part in name), kind)
        if (
            values.ndim == 1
            or name.endswith(("bias", "norm.weight"))
            or values.shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0] != 0
        ):
            chosen = Kind.F32
        data = encode(values, chosen)
        _back(source, name, np.asarray(gguf.dequantize(data, chosen), np.float32).reshape(values.shape))
        if plus_one and name.endswith("norm.weight") and gguf_hybrids.MODULE not in name:
            data = data + np.float32(1)
        heads = _head_count(source, name)
        writer.add_tensor(target, interleave(data, heads) if heads else data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    safetensors.numpy.save_file(source.tensors, source.folder / "model.safetensors", metadata={"format": "pt"})
    return path


def make_source(folder: Path, architecture: str, **settings: Any) -> Source:
    """A random checkpoint of transformers, with the vocabulary of the tests' tokenizer."""
    model = tiny_models.make_model(architecture, **{"vocab_size": VOCAB, "intermediate_size": 96, **settings})
    tiny_models.save(model, folder)
    return Source(folder)


def expected_logits(source: Source, tokens: NDArray[np.int32]) -> Array:
    """Logits of transformers from the checkpoint's folder, in float32."""
    return tiny_models.expected_logits(tiny_models.load(source.folder, torch.float32), tokens)
