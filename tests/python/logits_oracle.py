"""Kvanta's logits of a checkpoint, their distance from transformers', and faults to put into a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tiny_models
import tolerance
import torch
import transformers
from numpy.typing import NDArray

import kvanta
from kvanta.errors import InputError

TOKENS = np.random.default_rng(7).integers(0, tiny_models.VOCAB, 150).astype(np.int32)  # three pages, one of them open
ISAS = ("portable", "avx2", "avx512", "avx512fp16", "zen4", "amx", "neon", "dotprod", "i8mm")


def logits(
    folder: Path,
    dtype: str = "float32",
    kv_cache_dtype: str = "fp32",
    tokens: NDArray[np.int32] = TOKENS,
    **options: Any,
) -> NDArray[np.float32]:
    options = {"max_model_len": len(TOKENS), "max_num_batched_tokens": 64, "threads": 2, **options}
    llm = kvanta.LLM(folder, tokenizer="stories260k", dtype=dtype, kv_cache_dtype=kv_cache_dtype, **options)
    return llm.logits(tokens)


def largest_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def rms_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def divergence(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Mean KL divergence of the next token's distribution, in nats."""
    p, q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (expected, found))
    return float((p.exp() * (p - q)).sum(-1).mean())


def assert_equals_transformers(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Logits of the checkpoint in `folder`, which is of `model`, in float32."""
    expected, found = tiny_models.expected_logits(model, TOKENS), logits(folder)
    assert largest_error(found, expected) < tolerance.F32_LOGITS
    assert divergence(found, expected) < tolerance.F32_DIVERGENCE


def assert_equals_on_isa(isa: str, model: transformers.PreTrainedModel, folder: Path) -> None:
    """Saves the model; skips the test where the machine lacks `isa`, one of ISAS."""
    tiny_models.save(model, folder)
    try:
        found = logits(folder, isa=isa)
    except InputError as error:
        pytest.skip(str(error))
    assert largest_error(found, tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS


def assert_bf16_is_near(architecture: str, folder: Path, settings: dict[str, Any], **options: Any) -> Path:
    """In bfloat16, logits of random models are no farther from those in float32 than transformers'. Returns the last
    model's folder."""
    found, rounded = [], []
    for seed in range(4):
        last = folder / str(seed)
        model = tiny_models.make_model(architecture, seed, **settings)
        tiny_models.save(model, last, torch.bfloat16)
        exact = tiny_models.expected_logits(model, TOKENS)
        found.append(rms_error(logits(last, "auto", "bf16", **options), exact))
        rounded.append(rms_error(tiny_models.expected_logits(tiny_models.load(last, torch.bfloat16), TOKENS), exact))
    assert np.linalg.norm(found) < np.linalg.norm(rounded)
    return last


def edit_names(folder: Path, rename: Callable[[str], str]) -> None:
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file(
        {rename(name): value for name, value in tensors.items()}, file, metadata={"format": "pt"}
    )


def edit_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = safetensors.torch.load_file(file)
        tensors[name] = change(tensors[name]).contiguous()
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})

    return apply


def edit_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: tiny_models.edit_config(folder, **changes)


Fault = tuple[str, dict[str, Any], Callable[[Path], None]]
"""An architecture, the settings of its model, and what changes the checkpoint."""


def assert_noticed(fault: Fault, folder: Path) -> None:
    """The logits are right before the fault is put into the checkpoint in `folder`, and wrong after."""
    architecture, settings, inject = fault
    model = tiny_models.make_model(architecture, **settings)
    tiny_models.save(model, folder)
    expected = tiny_models.expected_logits(model, TOKENS)
    assert largest_error(logits(folder), expected) < tolerance.F32_LOGITS
    inject(folder)
    assert largest_error(logits(folder), expected) > 3 * tolerance.F32_LOGITS
