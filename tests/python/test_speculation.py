"""Speculative decoding from the outside: the same answers, options under every name, figures, usage and metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server
from prometheus_client.parser import text_string_to_metric_families

from kvanta import LLM, SamplingParams, StructuredOutputsParams
from kvanta.errors import InputError

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
REPETITIVE = "Lily had a red ball. Tom had a red ball. " * 4 + "Lily had a"
# Makes few tokens likely, so that answers repeat themselves.
FEW = dict.fromkeys(range(300, 304), 100.0)
REGEX = StructuredOutputsParams(regex="(red ball ){4}")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "speculation.py"


@pytest.fixture(scope="module")
def speculating() -> LLM:
    return LLM("stories260k", kv_cache_memory_bytes="32MiB", threads=1, speculative_config=NGRAM)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(options={"speculative_config": json.dumps(NGRAM)}) as running:
        yield running


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
        {"temperature": 1.0, "seed": 5, "n": 3, "logprobs": 0},
        {"temperature": 0.7, "seed": 6, "top_p": 0.9, "repetition_penalty": 1.05, "frequency_penalty": 0.1},
        {"temperature": 0.0, "logit_bias": FEW, "min_tokens": 30},
        {"temperature": 0.0, "stop": ["ball. To", "red"], "include_stop_str_in_output": True, "logprobs": 1},
        {"temperature": 0.0, "stop": ["ball. To"], "min_tokens": 8},
        {"temperature": 0.0, "allowed_token_ids": [300, 301]},
        {"temperature": 0.0, "structured_outputs": REGEX},
    ],
    ids=str,
)
def test_answers_are_the_same(llm: LLM, speculating: LLM, fields: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=60, **fields)
    (plain,) = llm.generate(REPETITIVE, params)
    (found,) = speculating.generate(REPETITIVE, params)
    assert found.prompt_logprobs == plain.prompt_logprobs
    for one, other in zip(found.outputs, plain.outputs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert one.logprobs == other.logprobs
        assert one.cumulative_logprob == other.cumulative_logprob
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        assert one.num_accepted_tokens <= min(one.num_draft_tokens, len(one.token_ids))
        assert other.num_draft_tokens == 0


def test_repetition_takes_few_steps(speculating: LLM) -> None:
    before = speculating.stats()
    params = SamplingParams(temperature=0.0, max_tokens=100, logit_bias=FEW, ignore_eos=True)
    (output,) = speculating.generate(REPETITIVE, params)
    text, after = output.outputs[0], speculating.stats()
    assert after["steps"] - before["steps"] < 45
    assert text.num_accepted_tokens > 60
    gained = {name: after["speculation"][name] - before["speculation"][name] for name in ("drafts", "accepted_tokens")}
    assert gained["accepted_tokens"] == text.num_accepted_tokens
    assert 0 < gained["drafts"] < 45
    positions = after["speculation"]["accepted_per_position"]
    assert len(positions) == 4
    assert sum(positions) == after["speculation"]["accepted_tokens"]
    assert positions == sorted(positions, reverse=True)


def test_streams_yield_the_same_text(llm: LLM, speculating: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=["ball. To"])
    texts = []
    for each in (llm, speculating):
        pieces = [piece for piece, _ in each.stream(REPETITIVE, params)]
        texts.append("".join(pieces))
    assert texts[0] == texts[1]


def test_constrained_requests_decode_plainly(speculating: LLM) -> None:
    """The same text is drafted where its tokens are likely instead of demanded."""
    constrained = SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=REGEX)
    (answer,) = speculating.generate(REPETITIVE, constrained)[0].outputs
    assert (answer.text, answer.num_draft_tokens) == ("red ball " * 4, 0)
    likely = dict.fromkeys(answer.token_ids, 100.0)
    free = SamplingParams(temperature=0.0, max_tokens=len(answer.token_ids), logit_bias=likely)
    assert speculating.generate(REPETITIVE, free)[0].outputs[0].num_draft_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": dict(NGRAM)},
        {"speculative_config": json.dumps(NGRAM)},
        {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6},
        {"spec_method": "ngram", "spec_tokens": 6},
    ],
    ids=str,
)
def test_options_have_the_names_of_others(options: dict[str, Any]) -> None:
    llm = LLM("stories260k", kv_cache_memory_bytes="8MiB", threads=1, **options)
    config = json.loads(llm.config.speculative_config)
    assert config["method"] == "ngram"
    expected = 4 if "speculative_config" in options else 6
    assert config["num_speculative_tokens"] == expected
    assert len(llm.stats()["speculation"]["accepted_per_position"]) == expected


def test_empty_values_ask_for_nothing() -> None:
    values: tuple[Any, ...] = (None, {}, "", "{}", "null")
    for value in values:
        llm = LLM("stories260k", kv_cache_memory_bytes="8MiB", threads=1, speculative_config=value)
        assert llm.config.speculative_config == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": {"method": "eagle"}}, "method 'eagle' is not supported; there are: ngram"),
        ({"speculative_config": {"methud": "ngram"}}, "key 'methud' is not known; there are: method, "),
        ({"speculative_config": {"num_speculative_tokens": 99}}, "99; expected an integer from 1 to 32"),
        ({"speculative_config": "ngram"}, "speculative_config"),
        ({"speculative_config": 3}, "speculative_config: 3 is neither a mapping nor its JSON"),
        ({"speculative_config": {"method": {1, 2}}}, "is not JSON"),
        ({"speculative_num_draft_tokens": 4}, "speculative_algorithm is missing"),
        ({"speculative_algorithm": "EAGLE3"}, "method 'eagle3' is not supported"),
        ({"speculative_algorithm": "NGRAM", "speculative_config": NGRAM}, "give the keys of speculative_config alone"),
    ],
    ids=str,
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        LLM("stories260k", kv_cache_memory_bytes="8MiB", threads=1, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def draft_tokens_by_metrics(server: LiveServer) -> tuple[float, float]:
    """Accepted and rejected draft tokens."""
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    values = {each.name: each.value for family in families for each in family.samples}
    accepted = values["kvanta:spec_decode_num_accepted_tokens_total"]
    return accepted, values["kvanta:spec_decode_num_draft_tokens_total"] - accepted


def test_usage_and_metrics_count_drafts(server: LiveServer) -> None:
    accepted, rejected = draft_tokens_by_metrics(server)
    body = {"temperature": 0, "max_tokens": 80, "logit_bias": FEW, "ignore_eos": True}
    usage = server.completion(prompt=REPETITIVE, **body)["usage"]
    details = usage["completion_tokens_details"]
    assert usage["completion_tokens"] == 80
    assert 40 < details["accepted_prediction_tokens"] < 80
    assert draft_tokens_by_metrics(server) == (
        accepted + details["accepted_prediction_tokens"],
        rejected + details["rejected_prediction_tokens"],
    )
    plain = server.completion(prompt=REPETITIVE, max_tokens=1)["usage"]
    assert "completion_tokens_details" not in plain


def test_the_benchmark_verifies_and_reports(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    words = ["stories260k", "--kv-cache-dtype", "int8", "--tokens", "30", "--characters", "300", "--pairs", "1"]
    words += ["--batch", "2", "--threads", "1", "--json", str(file)]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["work"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == {"editing", "summary", "new text"}
    assert all(row["plain_tokens_per_s"] > 0 and row["ratio"] > 0 for row in rows.values())
