"""Speculative decoding with a draft model: the same answers, its options, refusals, figures, usage and metrics."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from live_server import LiveServer, live_server

from kvanta import LLM, SamplingParams
from kvanta.checkpoint.resolve import resolve_model
from kvanta.errors import InputError

ITSELF = {"method": "draft_model", "model": "stories260k", "num_speculative_tokens": 4}
PROMPT = "Once upon a time, there was a little girl named Lily. " * 5 + "She"  # more than a page
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5, "n": 2, "logprobs": 1},
    {"temperature": 0.7, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.3},
]


@pytest.fixture(scope="module")
def drafted() -> LLM:
    """The draft model's cache is another one, so that some drafts are wrong."""
    config = {**ITSELF, "kv_cache_dtype": "int4_per_token_head"}
    return LLM("stories260k", kv_cache_memory_bytes="32MiB", threads=1, speculative_config=config)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(options={"speculative_config": json.dumps(ITSELF), "kv_cache_dtype": "int8"}) as running:
        yield running


@pytest.mark.parametrize("fields", PARAMS, ids=str)
def test_answers_are_the_same(llm: LLM, drafted: LLM, fields: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=80, **fields)
    (plain,) = llm.generate(PROMPT, params)
    (found,) = drafted.generate(PROMPT, params)
    for one, other in zip(found.outputs, plain.outputs, strict=True):
        assert (one.token_ids, one.text, one.logprobs) == (other.token_ids, other.text, other.logprobs)
        assert one.num_draft_tokens > 0
        assert other.num_draft_tokens == 0


@pytest.mark.parametrize("fields", PARAMS, ids=str)
def test_a_model_that_drafts_for_itself_is_right(fields: dict[str, Any]) -> None:
    llm = LLM("stories260k", kv_cache_memory_bytes="32MiB", kv_cache_dtype="int8", speculative_config=ITSELF)
    for output in llm.generate(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True, **fields))[0].outputs:
        assert output.num_accepted_tokens == output.num_draft_tokens > 0
    figures = llm.stats()["speculation"]
    assert figures["draft_weight_bytes"] == llm.stats()["weight_bytes"]
    assert figures["seconds_draft"] > 0
    assert figures["draft_cache_used_bytes"] > 0
    assert figures["draft_cache_budget_bytes"] + llm.stats()["cache_budget_bytes"] == 32 << 20


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"model": "stories260k", "num_speculative_tokens": 3}},
        {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "stories260k"},
        {"spec_model": "stories260k", "spec_tokens": 3, "speculative_draft_kv_cache_dtype": "bf16"},
    ],
    ids=str,
)
def test_options_have_the_names_of_others(options: dict[str, Any]) -> None:
    llm = LLM("stories260k", kv_cache_memory_bytes="8MiB", threads=1, **options)
    assert Path(json.loads(llm.config.speculative_config)["model"]) == resolve_model("stories260k").path
    assert llm.stats()["speculation"]["draft_weight_bytes"] > 0


def test_sizes_in_tokens_are_the_models() -> None:
    llm = LLM("stories260k", max_total_tokens=1024, max_num_seqs=1, kv_cache_dtype="int8", speculative_config=ITSELF)
    pages = llm.stats()["cache_budget_bytes"] / llm.stats()["page_bytes"]
    assert 15 <= pages <= 17


def other_tokenizer(folder: Path) -> Path:
    """A copy of the model in which two tokens have changed places."""
    copy = folder / "other"
    shutil.copytree(resolve_model("stories260k").path, copy)
    file = copy / "tokenizer.json"
    text = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = text["model"]["vocab"]
    if isinstance(vocabulary, dict):
        names = {index: name for name, index in vocabulary.items()}
        vocabulary[names[400]], vocabulary[names[401]] = 401, 400
    else:
        vocabulary[400], vocabulary[401] = vocabulary[401], vocabulary[400]
    file.write_text(json.dumps(text), encoding="utf-8")
    return copy


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    config = {"model": str(other_tokenizer(tmp_path))}
    with pytest.raises(InputError, match=r"has another vocabulary: token 400 is .*; they must be equal"):
        LLM("stories260k", kv_cache_memory_bytes="8MiB", speculative_config=config)
    tiny_models.save(tiny_models.make_model("Llama"), tmp_path / "tiny")
    with pytest.raises(InputError, match=r"has a vocabulary of .*; they must be equal"):
        LLM("stories260k", kv_cache_memory_bytes="8MiB", speculative_config={"model": str(tmp_path / "tiny")})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": "/no/such/folder"}, "there is no model '/no/such/folder'"),
        ({"method": "draft_model"}, "method draft_model needs the key model"),
        ({**ITSELF, "prompt_lookup_max": 3}, "key 'prompt_lookup_max' is not one of method draft_model; there are:"),
        ({"method": "ngram", "kv_cache_dtype": "int8"}, "key 'kv_cache_dtype' is not one of method ngram"),
        ({**ITSELF, "kv_cache_dtype": "fp8"}, "needs scales, which are not read for a draft model"),
        ({**ITSELF, "kv_cache_dtype": "int9"}, "int9"),
    ],
    ids=str,
)
def test_bad_options_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        LLM("stories260k", kv_cache_memory_bytes="8MiB", threads=1, speculative_config=config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_recurrent_draft_models_are_refused(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make_model("Qwen3Next"), tmp_path)
    config = {"model": str(tmp_path)}
    with pytest.raises(InputError, match=r"the draft model .* has recurrent layers \(Qwen3NextForCausalLM\)"):
        LLM("stories260k", kv_cache_memory_bytes="8MiB", threads=1, speculative_config=config)


def test_usage_and_metrics_count_drafts(server: LiveServer) -> None:
    usage = server.completion(prompt=PROMPT, temperature=0, max_tokens=40, ignore_eos=True)["usage"]
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] == 0
    samples = {}
    for line in server.client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            samples[line.split("{")[0]] = float(line.rsplit(" ", 1)[1])
    assert samples["kvanta:spec_decode_num_accepted_tokens_total"] == details["accepted_prediction_tokens"]
    assert samples["kvanta:draft_model_seconds_total"] > 0
    assert 0 < samples["kvanta:draft_cache_used_bytes"] <= samples["kvanta:draft_cache_budget_bytes"]
