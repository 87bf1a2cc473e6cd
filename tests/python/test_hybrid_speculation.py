"""Speculative decoding of models with recurrent layers: tokens and log-probabilities are those of plain decoding for
every kind of state, over batches, preemption, prefix hits and rounded states."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from cold_runs import Answers, add_tokenizer, with_logprobs

from kvanta import LLM, SamplingParams
from kvanta.errors import InputError
from kvanta.fleet.plan import plan

WIDE: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 1024}
MAMBA2: dict[str, Any] = {"mamba_d_ssm": 256, "mamba_head_dim": 32}
NGRAM = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
OPTIONS: dict[str, Any] = {"max_model_len": 1024, "threads": 2}
# Makes few tokens likely, so that answers repeat themselves; drafts are right and wrong.
FEW = dict.fromkeys(range(300, 304), 12.0)


def save_with_tokenizer(architecture: str, folder: Path, settings: dict[str, Any]) -> Path:
    tiny_models.save(tiny_models.make_model(architecture, **WIDE, **settings), folder, torch.bfloat16)
    return add_tokenizer(folder)


@pytest.fixture(
    scope="module",
    params=[
        ("Qwen3_5", {}),
        ("Qwen3Next", {}),
        ("Lfm2Moe", {}),
        ("GraniteMoeHybrid", MAMBA2),
        ("FalconH1", MAMBA2),
        ("NemotronH", MAMBA2),
        ("DeepseekV4", {}),
    ],
    ids=lambda param: param[0],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind of state."""
    return save_with_tokenizer(request.param[0], tmp_path_factory.mktemp("hybrid"), request.param[1])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer("Qwen3_5", tmp_path_factory.mktemp("qwen"), {})


def answers(llm: LLM, prompts: list[list[int]], seed: int = 0, tokens: int = 70) -> Answers:
    """Tokens of the answers, and their log-probabilities; every second prompt is sampled."""
    params = [
        SamplingParams(
            max_tokens=tokens + 9 * index,
            temperature=0.8 * (index % 2),
            seed=seed + index,
            logprobs=0,
            ignore_eos=True,
            logit_bias=FEW,
        )
        for index in range(len(prompts))
    ]
    return with_logprobs(llm.generate(prompts, params))


def prompts_of(seed: int, count: int = 4) -> list[list[int]]:
    """Prompts that share beginnings."""
    choice = random.Random(seed)
    system = [choice.randrange(3, 512) for _ in range(200)]
    return [
        [*system[: choice.choice([40, 130, 200])], *(choice.randrange(3, 512) for _ in range(choice.randrange(1, 140)))]
        for _ in range(count)
    ]


def check_figures(llm: LLM) -> None:
    figures = llm.stats()["speculation"]
    assert 0 < figures["accepted_tokens"] < figures["draft_tokens"]


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "int4"])
def test_answers_are_those_of_plain_decoding(folder: Path, kv_cache_dtype: str) -> None:
    prompts = prompts_of(3)
    plain = LLM(folder, kv_cache_dtype=kv_cache_dtype, kv_cache_memory_bytes="16MiB", max_num_seqs=1, **OPTIONS)
    expected = answers(plain, prompts)
    options = OPTIONS | {"kv_cache_dtype": kv_cache_dtype, "speculative_config": NGRAM}
    batched = LLM(folder, kv_cache_memory_bytes="16MiB", **options)
    assert answers(batched, prompts) == expected
    check_figures(batched)
    # Each prompt is the last one with its answer, which the prefix cache has.
    longer = [[*prompt, *tokens, 300, 301] for prompt, (tokens, _) in zip(prompts, expected, strict=True)]
    hits = batched.stats()["cached_tokens"]
    assert answers(batched, longer, 7) == answers(plain, longer, 7)
    assert batched.stats()["cached_tokens"] > hits


def run_scarce(folder: Path, seed: int) -> tuple[int, int]:
    """Compares runs with random options in little memory; preemptions and tokens from the prefix cache."""
    choice = random.Random(seed)
    options: dict[str, Any] = {
        **OPTIONS,
        "max_model_len": 512,
        "kv_cache_dtype": choice.choice(["bf16", "int8", "kivi4", "int4+exact=2"]),
        "state_cache_dtype": ["int8", "bfloat16", "int4", "float32"][seed % 4],
        "state_grid": choice.choice([64, 128]),
    }
    plain = LLM(folder, kv_cache_memory_bytes="64MiB", enable_prefix_caching=False, max_num_seqs=1, **options)
    speculating = LLM(
        folder,
        kv_cache_memory_bytes="330KiB",
        max_num_seqs=4,
        max_num_batched_tokens=choice.choice([64, 100, 512]),
        speculative_config={**NGRAM, "num_speculative_tokens": choice.choice([1, 4, 16])},
        **options,
    )
    prompts = [prompt[:150] for prompt in prompts_of(seed)]
    for turn in range(2):  # the second time with prefix hits
        assert answers(speculating, prompts, turn, 200) == answers(plain, prompts, turn, 200), options
    check_figures(speculating)
    stats = speculating.stats()
    return stats["preemptions"], stats["cached_tokens"]


def test_preemption_and_rounded_states(qwen: Path) -> None:
    preemptions, hits = zip(*(run_scarce(qwen, seed) for seed in range(6)), strict=True)
    assert sum(preemptions) > 0
    assert sum(hits) > 0


def test_a_draft_model_of_attention(qwen: Path, tmp_path: Path) -> None:
    draft = save_with_tokenizer("Llama", tmp_path, {})
    plain = LLM(qwen, kv_cache_memory_bytes="16MiB", **OPTIONS)
    config = {"model": str(draft), "num_speculative_tokens": 3}
    drafted = LLM(qwen, kv_cache_memory_bytes="16MiB", speculative_config=config, **OPTIONS)
    prompts = prompts_of(5)
    assert answers(drafted, prompts) == answers(plain, prompts)
    check_figures(drafted)


def test_answers_that_stop_inside_a_draft(qwen: Path) -> None:
    plain = LLM(qwen, kv_cache_memory_bytes="16MiB", **OPTIONS)
    speculating = LLM(qwen, kv_cache_memory_bytes="16MiB", speculative_config=NGRAM, **OPTIONS)
    prompt = prompts_of(8)[0]
    for length in range(30, 50):
        params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, logit_bias=FEW)
        (one,) = plain.generate([prompt], params)
        (other,) = speculating.generate([prompt], params)
        assert other.outputs[0].token_ids == one.outputs[0].token_ids
    # A longer prompt continues with the pages that these left in the prefix cache.
    longer = [[*prompt, *one.outputs[0].token_ids, 5]]
    assert answers(speculating, longer) == answers(plain, longer)


def test_pipelines_are_refused(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 8, "layer_types": ["linear_attention", "full_attention"] * 4}
    folder = save_with_tokenizer("Qwen3_5", tmp_path, layers)
    with pytest.raises(InputError, match=r"recurrent layers, with pipeline_parallel_size = 2; there is: 1"):
        LLM(folder, kv_cache_memory_bytes="16MiB", pipeline_parallel_size=2, speculative_config=NGRAM)


def test_plans_count_what_is_kept_of_drafts(qwen: Path) -> None:
    def sequences(**options: Any) -> int:
        figures = plan(str(qwen), 64 << 20, ["int8"], options=options)
        return int(figures["formats"][0]["sequences"])

    assert sequences(speculative_config=NGRAM) < sequences()
