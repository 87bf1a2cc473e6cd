"""Accuracy of the engine against Hugging Face transformers, and of its quantized caches against its own bf16 cache.

    python benchmarks/accuracy.py smollm2 --text wiki.test.raw --tokens 2048 --json docs/results/accuracy.json

The reference is transformers in float32 on the same folder (needs torch). KL(reference || engine) in nats per token,
teacher-forced over one window from the start of the text.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvanta
from kvanta.checkpoint.resolve import resolve_model
from kvanta.evaluate.divergence import kl_divergence

Logits = npt.NDArray[np.float32]


def compare(reference: Logits, other: Logits) -> dict[str, float]:
    """Mean and maximum KL(reference || other), nats per token, and the share of rows with the same top-1 token."""
    kl = kl_divergence(reference, other)
    top1 = float((reference.argmax(-1) == other.argmax(-1)).mean())
    return {"kl_mean": float(kl.mean()), "kl_max": float(kl.max()), "top1": top1}


def transformers_logits(folder: Path, tokens: list[int]) -> Logits:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: Logits = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--formats", nargs="+", default=["fp8", "int8", "int4"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    folder = resolve_model(options.model).path
    llm = kvanta.LLM(model=str(folder), max_model_len=options.tokens)
    tokens = llm.tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.tokens]
    report: dict[str, Any] = {"model": options.model, "text": options.text.name, "tokens": len(tokens)}
    reference = transformers_logits(folder, tokens)

    own = llm.logits(tokens)
    del llm
    report["against_transformers"] = {"default dtype": compare(reference, own)}
    exact = kvanta.LLM(model=str(folder), dtype="float32", max_model_len=options.tokens).logits(tokens)
    report["against_transformers"]["float32"] = compare(reference, exact)
    del exact, reference
    report["against_own_bf16_cache"] = {}
    for name in options.formats:
        quantized = kvanta.LLM(model=str(folder), kv_cache_dtype=name, max_model_len=options.tokens).logits(tokens)
        report["against_own_bf16_cache"][name] = compare(own, quantized)

    for section in ("against_transformers", "against_own_bf16_cache"):
        for name, row in report[section].items():
            print(
                f"{section:24} {name:16} mean KL {row['kl_mean']:.2e}  max {row['kl_max']:.2e}  top-1 {row['top1']:.4f}"
            )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
