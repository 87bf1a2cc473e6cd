"""Speculative decoding with the checkpoint's own predictor (MTP): its proposals are those of transformers' modules, and
answers have the bits of plain decoding."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import tiny_mtp
import torch

from kvanta import LLM, SamplingParams
from kvanta.errors import InputError

ARCHITECTURES = ["Qwen3_5", "Qwen3Next", "Glm4Moe", "DeepseekV3", "Mellum"]
FEW = {20: 6.0, 21: 6.0, 22: 6.0}  # makes few tokens likely, so that some drafts are right
TWO = {20: 12.0, 21: 12.0}
OPTIONS: dict[str, Any] = {"tokenizer": "stories260k", "max_model_len": 256, "threads": 2}
WIDE = {"head_dim": 32, "hidden_size": 128}


def load(folder: Path, tokens: int = 0, **options: Any) -> LLM:
    """With `tokens` draft tokens."""
    if tokens:
        cache = options.pop("draft_cache", "int8")
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": tokens, "kv_cache_dtype": cache}
    return LLM(folder, **{"kv_cache_memory_bytes": "16MiB", **OPTIONS, **options})


def expected_counts(tokens: list[int], prompt: int, right: list[bool], min_acceptance: float) -> tuple[int, int]:
    """Draft tokens and accepted ones of a request that drafts one token a step; right[n]: a draft of token n."""
    length, drafts, accepted = prompt + 1, 0, 0
    acceptance, pause, next_pause = 1.0, 0, 8
    while length < len(tokens):
        is_right = False
        has_slot = length % 64 not in (0, 63)  # drafts leave the page open
        if has_slot and length + 1 < len(tokens):
            if pause > 0:
                pause -= 1
            else:
                is_right = right[length]
                drafts += 1
                accepted += is_right
                acceptance += (is_right - acceptance) / 8
                if acceptance >= min_acceptance:
                    next_pause = max(8, next_pause // 2)
                else:
                    pause, next_pause, acceptance = next_pause, min(2 * next_pause, 256), min_acceptance
        length += 1 + is_right
    return drafts, accepted


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_proposals_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    predictor = tiny_mtp.make_predictor(architecture)
    tiny_mtp.save(predictor, tmp_path)
    llm = load(tmp_path, 1, draft_cache="fp32", dtype="float32", kv_cache_dtype="fp32")
    stats = llm.stats()
    min_acceptance = 0.1 + stats["speculation"]["draft_weight_bytes"] / stats["weight_bytes"]
    total = 0
    for seed in range(4):
        prompt = np.random.default_rng(seed).integers(3, 96, 30 + 40 * seed).tolist()
        params = SamplingParams(max_tokens=100, temperature=0, logit_bias=TWO, ignore_eos=True)
        (output,) = llm.generate([prompt], params)
        text = output.outputs[0]
        tokens = [*prompt, *text.token_ids]
        logits = predictor.logits(tokens)
        for token, bias in TWO.items():
            logits[:, token] += bias
        right = [False, False, *(logits.argmax(-1)[:-1] == tokens[2:]).tolist()]
        expected = expected_counts(tokens, len(prompt), right, min_acceptance)
        assert (text.num_draft_tokens, text.num_accepted_tokens) == expected
        total += expected[1]
    assert total > 20


def test_drafts_continue_drafts(tmp_path: Path) -> None:
    """A model whose next token depends on the last one alone, and a predictor that knows it from the embedding."""
    predictor = tiny_mtp.make_predictor("Qwen3_5")
    with torch.no_grad():
        for part in (predictor.model, predictor.trunk):
            for name, parameter in part.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    parameter.zero_()
        predictor.embedding_norm.weight.zero_()  # these norms add one
        predictor.trunk.model.norm.weight.copy_(predictor.model.model.norm.weight)
        predictor.projection[:] = torch.eye(64, 128)
    tiny_mtp.save(predictor, tmp_path)
    for _ in range(5):  # a machine's other work makes drafts seem dear for a while, and then they pause
        llm = load(tmp_path, 4, dtype="float32")
        (output,) = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=120, temperature=0, ignore_eos=True))
        assert output.outputs[0].num_accepted_tokens == output.outputs[0].num_draft_tokens
        if output.outputs[0].num_draft_tokens > 80:
            break
    assert output.outputs[0].num_draft_tokens > 80
    assert all(count > 0 for count in llm.stats()["speculation"]["accepted_per_position"])


def answers(llm: LLM, prompts: list[list[int]], seed: int) -> list[tuple[Any, Any]]:
    """Tokens of the answers with their log-probabilities; every second one is sampled."""
    params = [
        SamplingParams(
            max_tokens=60 + 5 * index,
            temperature=0.8 * (index % 2),
            seed=seed + index,
            logprobs=0,
            ignore_eos=True,
            logit_bias=FEW,
        )
        for index in range(len(prompts))
    ]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.mark.parametrize("architecture", ["Qwen3_5", "Glm4Moe", "DeepseekV3", "Mellum"])
def test_answers_are_those_of_plain_decoding(architecture: str, tmp_path: Path) -> None:
    settings = WIDE if architecture != "DeepseekV3" else {}
    tiny_mtp.save(tiny_mtp.make_predictor(architecture, **settings), tmp_path, torch.bfloat16)
    choice = random.Random(4)
    system = [choice.randrange(3, 96) for _ in range(90)]
    prompts = [[*system, *(choice.randrange(3, 96) for _ in range(5 + 20 * index))] for index in range(4)]
    plain = load(tmp_path, max_num_seqs=1, enable_prefix_caching=False)
    expected = [answers(plain, prompts, seed) for seed in range(2)]
    for memory in ("16MiB", "900KiB"):
        drafted = load(tmp_path, 3, kv_cache_memory_bytes=memory, max_num_batched_tokens=100)
        assert [answers(drafted, prompts, seed) for seed in range(2)] == expected  # the second with prefix hits
        figures = drafted.stats()["speculation"]
        assert 0 < figures["accepted_tokens"] < figures["draft_tokens"]
        assert figures["seconds_draft"] > 0
        assert figures["draft_cache_budget_bytes"] > 0
        assert drafted.stats()["cached_tokens"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "qwen3_next_mtp", "num_speculative_tokens": 2}},
        {"speculative_algorithm": "NEXTN"},
        {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 2},
        {"spec_method": "mtp", "spec_tokens": 2},
    ],
    ids=str,
)
def test_options_have_the_names_of_others(options: dict[str, Any], tmp_path: Path) -> None:
    tiny_mtp.save(tiny_mtp.make_predictor("Qwen3_5"), tmp_path)
    llm = load(tmp_path, **options)
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert output.outputs[0].num_draft_tokens > 0
    assert json.loads(llm.config.speculative_config)["method"] in ("mtp", "qwen3_next_mtp")


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("Llama", {"method": "mtp"}, "method mtp: LlamaForCausalLM has no layers that predict tokens"),
        ("Qwen3_5", {"method": "mtp"}, "has no tensor mtp.pre_fc_norm_hidden.weight"),
        ("Qwen3_5", {"method": "mtp", "model": "stories260k"}, "key 'model' is not one of method mtp"),
        ("Qwen3_5", {"method": "mtp", "num_speculative_tokens": 33}, "num_speculative_tokens"),
    ],
    ids=str,
)
def test_bad_options_are_named(architecture: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make_model(architecture), tmp_path)
    with pytest.raises(InputError) as error:
        load(tmp_path, speculative_config=config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_ranks_are_refused(tmp_path: Path) -> None:
    tiny_mtp.save(tiny_mtp.make_predictor("Glm4Moe"), tmp_path)
    with pytest.raises(InputError, match=r"method mtp with tensor_parallel_size = 2 is not supported"):
        load(tmp_path, 2, tensor_parallel_size=2)
