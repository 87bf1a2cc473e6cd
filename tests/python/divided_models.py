"""Tiny models that ranks divide, and what an engine computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import gguf_models
import numpy as np
import quantized_checkpoints as layouts
import tiny_models
import torch
from gguf_models import encode
from numpy.typing import NDArray
from tiny_gguf import TinyModel, write_gguf

from kvanta import LLM, SamplingParams

TOKENS = np.random.default_rng(5).integers(3, tiny_models.VOCAB, 90).astype(np.int32)
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=3, logprobs=4, ignore_eos=True)
# Divide among four ranks. Experts do so unevenly.
FOUR = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256}
EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 90},
    "GptOss": {"intermediate_size": 90},
    "Llama4": {"intermediate_size": 90},
    "DeepseekV3": {"num_key_value_heads": 8},
    "Step3p5": {"num_sliding_attention_heads": 12},
    "DeepseekV32": {"num_key_value_heads": 8},
    "DeepseekV4": {
        "num_key_value_heads": 1,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 32},
    },
}

# Logits, tokens and log-probabilities.
Computed = tuple[NDArray[np.float32], list[Any], list[Any]]


def saved(architecture: str, folder: Path, **settings: Any) -> Path:
    settings = {**FOUR, **EXPERTS.get(architecture, {}), **settings}
    tiny_models.save(tiny_models.make_model(architecture, **settings), folder, torch.bfloat16)
    return folder


def quantized(folder: Path, layout: str, architecture: str = "Llama") -> Path:
    groups = {"intermediate_size": 192, "moe_intermediate_size": 64}
    source = saved(architecture, folder / "source", **groups)
    layouts.write(source, folder / "quantized", folder / "twin", layouts.LAYOUTS[layout])
    return folder / "quantized"


def blocks(folder: Path, kind: str) -> Path:
    """A GGUF file, whose rows of q and k are in llama.cpp's order."""
    model = TinyModel(heads=8, kv_heads=4, head_dim=32, ffn=256, vocab=tiny_models.VOCAB + 205)
    path = folder / "model.gguf"
    return write_gguf(path, model, model.weights(), kind=gguf.GGMLQuantizationType[kind], encode=encode)


def gguf_file(folder: Path, architecture: str, kind: str, **settings: Any) -> Path:
    source = gguf_models.make_source(
        folder, architecture, **{**FOUR, **EXPERTS.get(architecture, {}), "moe_intermediate_size": 64, **settings}
    )
    return gguf_models.write(source, folder / "model.gguf", gguf.GGMLQuantizationType[kind])


def compute(model: Path, ranks: int, **options: Any) -> Computed:
    """Logits of a text, and tokens and log-probabilities of requests that share steps and a prefix."""
    llm = LLM(
        model,
        tokenizer="stories260k",
        max_model_len=160,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=32,
        kv_cache_memory_bytes=1 << 22,
        threads=1,
        **options,
    )
    prompts = [{"prompt_token_ids": TOKENS[:count].tolist()} for count in (70, 33, 5, 1)]
    outputs = [output.outputs[0] for output in llm.generate(prompts, PARAMS)]
    found = llm.logits(TOKENS), [output.token_ids for output in outputs], [output.logprobs for output in outputs]
    children = list(llm._loaded._ranks.processes) if llm._loaded._ranks else []
    assert len(children) == ranks - 1
    del llm
    for child in children:
        assert child.wait(120) == 0
    return found


def assert_same_bits(found: Computed, expected: Computed) -> None:
    np.testing.assert_array_equal(found[0].view(np.uint32), expected[0].view(np.uint32))
    assert found[1:] == expected[1:]
