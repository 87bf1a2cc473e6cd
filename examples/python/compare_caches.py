"""Mean KL divergence of cache formats from the bf16 cache, and what they take: a model's predictions, teacher-forced.

`kvanta eval` does this with confidence intervals, for every format. Here it is in 20 lines of numpy.

python examples/python/compare_caches.py [MODEL] [FORMAT ...]
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from kvanta import LLM

TEXT = (
    "One day, a little girl named Lily found a big red ball in the park. She wanted to play, but it was high up. "
    "Her friend Tom came and they played together all day. They were very happy and laughed a lot. In the evening "
    "her mother said that it was time to go home. Lily was sad, but she knew that Tom would come back the next day. "
)


def log_probabilities(model: str, kv_cache_dtype: str) -> tuple[NDArray[np.float64], float]:
    """[tokens, vocab], natural logarithms; and the bytes that a token takes in the cache."""
    llm = LLM(model, kv_cache_dtype=kv_cache_dtype, max_model_len=512)
    logits = llm.logits(llm.get_tokenizer().encode(TEXT)).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), llm.stats()["bytes_per_token"]


def main(model: str = "smollm2", *formats: str) -> None:
    expected, _ = log_probabilities(model, "bf16")
    for name in formats or ("fp8_per_token_head", "int8", "int4"):
        found, size = log_probabilities(model, name)
        divergence = (np.exp(expected) * (expected - found)).sum(axis=1)
        same = (expected.argmax(axis=1) == found.argmax(axis=1)).mean()
        print(f"{name}: {size:,.0f} bytes per token, mean KL {divergence.mean():.5f}, same top token {same:.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
