"""Kvanta's logits of a checkpoint, their distance from transformers', and faults to put into a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import tiny_models
import tolerance
import torch
from numpy.typing import NDArray

import kvanta

TOKENS = np.random.default_rng(7).integers(0, tiny_models.VOCAB, 150).astype(np.int32)  # three pages, one of them open


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
