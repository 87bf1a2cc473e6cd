"""The same bits for many users: tokens and log-probabilities of a quantized cache, under four schedules.

Prompts run alone, in one batch, from the prefix cache, and with other threads and chunks. Exit status 1: a bit differs.

python examples/python/same_bits.py [MODEL] [FORMAT]
"""

from __future__ import annotations

import sys

from kvanta import LLM, SamplingParams

PREFIX = "Once upon a time there was a little girl named Lily who loved to play outside in the park with her dog. " * 4
PROMPTS = [PREFIX + end for end in ("One day", "Her mother", "The dog", "In the evening", "Tom")]
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=7, logprobs=2, ignore_eos=True)

Answer = list[tuple[int, float]]
"""Tokens with their log-probabilities."""


def answers(llm: LLM, prompts: list[str]) -> tuple[list[Answer], int]:
    """The answers to prompts that run together, and the number of prompt tokens that came from the prefix cache."""
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    found = [
        [(token, scores[token].logprob) for token, scores in zip(out.token_ids, out.logprobs or (), strict=True)]
        for output in outputs
        for out in output.outputs
    ]
    return found, sum(output.num_cached_tokens for output in outputs)


def main(model: str = "smollm2", kv_cache_dtype: str = "int4") -> None:
    llm = LLM(model, kv_cache_dtype=kv_cache_dtype, max_model_len=512, threads=1)
    alone: list[Answer] = []
    for prompt in PROMPTS:
        llm.reset_prefix_cache()
        alone += answers(llm, [prompt])[0]
    llm.reset_prefix_cache()
    other = LLM(model, kv_cache_dtype=kv_cache_dtype, max_model_len=512, threads=2, max_num_batched_tokens=64)
    different = 0
    for title, engine in (("one batch", llm), ("prefix cache", llm), ("2 threads, chunks of 64 tokens", other)):
        found, cached = answers(engine, PROMPTS)
        same = sum(one == two for one, two in zip(alone, found, strict=True))
        different += len(PROMPTS) - same
        print(
            f"{kv_cache_dtype}, {title}: {same} of {len(PROMPTS)} answers have the same bits ({cached} cached tokens)"
        )
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
