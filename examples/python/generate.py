"""Texts for several prompts on a quantized KV cache, and what the cache takes.

python examples/python/generate.py [MODEL] [FORMAT]
"""

from __future__ import annotations

import sys

from kvanta import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The capital of France is"]


def main(model: str = "smollm2", kv_cache_dtype: str = "int8") -> None:
    llm = LLM(model, kv_cache_dtype=kv_cache_dtype, max_model_len=512)
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    for output in llm.generate(PROMPTS, greedy):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")
    stats = llm.stats()
    print(f"cache {stats['kv_cache_dtype']}: {stats['bytes_per_token']:,.0f} bytes per token")


if __name__ == "__main__":
    main(*sys.argv[1:])
