"""Answers with their log-probabilities, and conversations whose answers must have the bits of cold runs."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from kvanta import LLM, SamplingParams
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.outputs import RequestOutput

VOCABULARY = 512
Answers = list[tuple[list[int], list[float]]]


def add_tokenizer(folder: Path) -> Path:
    """Copies the tokenizer of stories260k into a checkpoint, which has VOCABULARY tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED / "stories260k" / name, folder / name)
    return folder


def with_logprobs(outputs: list[RequestOutput]) -> Answers:
    """Tokens of the answers, and their log-probabilities."""
    answers = [output.outputs[0] for output in outputs]
    return [
        (
            list(each.token_ids),
            [entry[token].logprob for token, entry in zip(each.token_ids, each.logprobs or [], strict=True)],
        )
        for each in answers
    ]


def compare_with_cold_runs(
    folder: Path, cache: dict[str, Any], budgets: list[str], choice: random.Random, disk: Path, **running: Any
) -> int:
    """Runs conversations through an engine with random options; every answer must be that of a cold run.

    `cache`: options of both engines; `running`: of that one alone. Returns the number of tokens that the prefix cache
    gave.
    """
    system = [choice.randrange(3, VOCABULARY) for _ in range(choice.randrange(40, 400))]
    prompts = [
        [*system[: choice.randrange(30, len(system) + 1)], *(choice.randrange(3, VOCABULARY) for _ in range(length))]
        for length in (choice.randrange(1, 300) for _ in range(4))
    ]
    params = SamplingParams(max_tokens=choice.randrange(2, 90), temperature=0.7, seed=3, logprobs=0, ignore_eos=True)
    cold = LLM(folder, **cache, enable_prefix_caching=False, kv_cache_memory_bytes="64MiB", max_num_batched_tokens=2048)
    options = cache | {
        "max_num_batched_tokens": choice.choice([64, 100, 256, 700]),
        "kv_cache_memory_bytes": choice.choice(budgets),
        "max_num_seqs": choice.choice([1, 2, 4]),
    }
    if choice.random() < 0.5:
        options["kv_cache_dir"] = str(disk)
    options |= running
    found = 0
    for _ in range(2):  # with a folder, the second engine is a restart
        llm = LLM(folder, **options)
        for _ in range(2):
            expected = [with_logprobs(cold.generate([prompt], params))[0] for prompt in prompts]
            assert with_logprobs(llm.generate(prompts, params)) == expected, options
            # The next turn of each conversation.
            more = [choice.randrange(3, VOCABULARY) for _ in range(choice.randrange(1, 70))]
            prompts = [[*prompt, *answer[0], *more] for prompt, answer in zip(prompts, expected, strict=True)]
        found += llm.stats()["cached_tokens"]
    return found
