"""Converts a model folder to a GGUF file for another engine: bit-identical bf16 weights and the same tokenizer."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))

from biased_twins import Tensors, read_tensors
from tiny_gguf import gguf_name, interleave

from kvanta.files.safetensors_writer import to_bf16
from kvanta.gguf.convert import convert_gguf
from kvanta.gguf.pre_tokenizers import PRE_TOKENIZERS

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type


def _json(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def _weights(folder: Path) -> Tensors:
    tensors, dtype = read_tensors(folder / "model.safetensors")
    if dtype != "BF16":
        raise SystemExit(f"error: the weights of {folder} are {dtype}; only BF16 ones are written")
    return tensors


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    tokenizer = _json(folder / "tokenizer.json")
    steps = tokenizer["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    names = [name for name, known in PRE_TOKENIZERS.items() if list(known.steps) == steps]
    if tokenizer["model"]["type"] != "BPE" or not names:
        raise SystemExit(f"error: the tokenizer of {folder} is no byte-level BPE whose cuts have a name in GGUF")
    by_id = {token: text for text, token in tokenizer["model"]["vocab"].items()}
    types = dict.fromkeys(by_id, _NORMAL)
    for added in tokenizer["added_tokens"]:
        by_id[added["id"]] = added["content"]
        types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    if sorted(by_id) != list(range(config["vocab_size"])):
        raise SystemExit(f"error: {folder} has {len(by_id)} tokens for a vocabulary of {config['vocab_size']}")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(names[0])
    writer.add_token_list([by_id[token] for token in range(len(by_id))])
    writer.add_token_types([types[token] for token in range(len(by_id))])
    writer.add_token_merges(merges)
    writer.add_add_bos_token(bool(_json(folder / "tokenizer_config.json").get("add_bos_token", False)))
    endings = config.get("eos_token_id")
    for add, value in ((writer.add_bos_token_id, config.get("bos_token_id")), (writer.add_eos_token_id, endings)):
        if value is not None:
            add(value[0] if isinstance(value, list) else value)


def write_exact_gguf(folder: Path, path: Path) -> None:
    """Writes the model of `folder` (bf16, byte-level BPE) to `path`, reads it back and compares every weight."""
    config = _json(folder / "config.json")
    kind = config["model_type"]
    if kind not in _ARCHITECTURES or config.get("rope_scaling"):
        raise SystemExit(f"error: {folder} is a {kind!r} model; only plain {', '.join(_ARCHITECTURES)} are written")
    tensors = _weights(folder)
    writer = gguf.GGUFWriter(path, kind)
    _add_config(writer, config)
    _add_tokenizer(writer, folder, config)
    heads = (
        {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]} if kind == "llama" else {}
    )
    for name, values in tensors.items():
        module = name.split(".")[-2]
        rows = interleave(values, heads[module]) if module in heads else values
        if values.ndim == 1:  # llama.cpp requires norms and biases in f32, which represents bf16 exactly
            writer.add_tensor(gguf_name(name), rows)
        else:
            bits = np.ascontiguousarray(to_bf16(rows)).view(np.uint8)
            writer.add_tensor(gguf_name(name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        back = _weights(convert_gguf(path, Path(work) / "back"))
    if back.keys() != tensors.keys() or any(back[name].tobytes() != tensors[name].tobytes() for name in tensors):
        raise SystemExit(f"error: {path} does not hold the weights of {folder}")
