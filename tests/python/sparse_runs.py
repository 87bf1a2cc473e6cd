"""Runs of models whose attention is sparse: the ways to a token that must give the same bits, in any formats of keys
and values and of the keys of indexers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvanta import LLM, SamplingParams
from kvanta.fleet.plan import plan

GREEDY = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)


def generate(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]


def assert_chunks_equal_one_pass(folder: Path, options: dict[str, Any], chunk: int) -> None:
    """Logits of a text in chunks, and tokens of decoding, against one pass; the vocabulary has 512 tokens."""
    whole = LLM(folder, **options, max_num_batched_tokens=512)
    parts = LLM(folder, **options, max_num_batched_tokens=chunk)
    tokens = np.random.default_rng(3).integers(3, 512, 400).astype(np.int32)
    np.testing.assert_array_equal(parts.logits(tokens), whole.logits(tokens))
    (output,) = generate(parts, [tokens[:130].tolist()])
    row = whole.logits(np.array(tokens[:130].tolist() + list(output)))
    assert [int(x) for x in row[129:-1].argmax(-1)] == list(output)


def assert_hits_and_preemptions_equal_a_cold_run(
    folder: Path, options: dict[str, Any], *, rounds: int, cached_tokens: int
) -> LLM:
    """Tokens of prompts that share their start, `rounds` times in turn, then of all at once in a cache for little more
    than one sequence; at least `cached_tokens` of the rounds are found. Returns the engine of the small cache."""
    random = np.random.default_rng(5)
    system = random.integers(3, 512, 200).tolist()
    prompts = [system + random.integers(3, 512, 110 + 50 * i).tolist() for i in range(3)]
    cold = LLM(folder, **options, enable_prefix_caching=False)
    warm = LLM(folder, **options)
    expected = [generate(cold, [prompt])[0] for prompt in prompts]
    assert [generate(warm, [prompt])[0] for prompt in prompts * rounds] == expected * rounds
    assert warm.stats()["cached_tokens"] >= cached_tokens
    longer = prompts[0] + list(expected[0]) + random.integers(3, 512, 30).tolist()
    of_longer = generate(cold, [longer])
    assert generate(warm, [longer]) == of_longer
    # All at once, in a cache that makes them wait and be computed again.
    of_indexers = {"indexer_cache_dtype": options["indexer_cache_dtype"]}
    planned = plan(str(folder), 1 << 30, [options["kv_cache_dtype"]], 1024, options=of_indexers)
    most = planned["formats"][0]["sequence_bytes"]
    small = LLM(folder, **{**options, "kv_cache_memory_bytes": int(1.1 * most)})
    many = [*prompts, longer] * 3
    assert generate(small, many) == [*expected, *of_longer] * 3
    return small


def assert_pages_are_found_on_disk(
    folder: Path, options: dict[str, Any], directory: Path, *, cached_tokens: int
) -> None:
    """A conversation that goes on after a restart: at least `cached_tokens` are found, and its tokens are those of a
    cold run."""
    prompt = np.random.default_rng(6).integers(3, 512, 330).tolist()
    kept = {**options, "kv_cache_dir": str(directory)}
    [cold] = LLM(folder, **kept).generate([prompt], GREEDY)
    history = prompt + list(cold.outputs[0].token_ids) + [7, 8, 9]
    [found] = LLM(folder, **kept).generate([history], GREEDY)
    assert found.num_cached_tokens >= cached_tokens
    [expected] = LLM(folder, **options, enable_prefix_caching=False).generate([history], GREEDY)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
