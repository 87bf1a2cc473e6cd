"""Precision by pressure: under little memory nothing is preempted above the floor, and a replay has the same bits."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from cold_runs import VOCABULARY, add_tokenizer
from live_server import LiveServer, error_of, live_server

from kvanta import LLM, SamplingParams
from kvanta.errors import InputError
from kvanta.evaluate import Settings, evaluate
from kvanta.fleet.plan import plan
from kvanta.outputs import CompletionOutput

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 128, "max_position_embeddings": 2048}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 32},
    "Gemma2": {"head_dim": 32, "sliding_window": 150},  # every other layer
    "DeepseekV2": {},  # MLA
    "Qwen3_5": {"head_dim": 32},  # recurrent layers
}
FLOORS = {
    "Llama": [("int8", "t3"), ("int8", "int4,t2"), ("int4", "t2+sink=0"), ("int8", "k=int4,v=t3")],
    "Gemma2": [("int8", "t3+sink=0"), ("int4", "t3")],
    "DeepseekV2": [("bf16", "mla_int4"), ("mla_fp8", "int4")],
    "Qwen3_5": [("int8", "t3")],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for model, own in MODELS.items():
        folder = tmp_path_factory.mktemp(model)
        tiny_models.save(tiny_models.make_model(model, **SIZES, **own), folder, torch.bfloat16)
        folders[model] = add_tokenizer(folder)
    return folders


def bits(output: CompletionOutput) -> tuple[Any, ...]:
    return output.token_ids, output.logprobs, output.finish_reason


def assert_predictions(llm: LLM, prompt: list[int], answer: CompletionOutput) -> None:
    """The logits of the answer's levels are those that its log-probabilities come from."""
    assert answer.kv_cache is not None
    assert answer.logprobs is not None
    rows = llm.logits([*prompt, *answer.token_ids[:-1]], kv_cache_events=answer.kv_cache.events)[len(prompt) - 1 :]
    for row, token, known in zip(rows.astype(np.float64), answer.token_ids, answer.logprobs, strict=True):
        expected = row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
        assert known[token].logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", MODELS)
def test_a_replay_has_the_bits_of_the_answer(folders: dict[str, Path], model: str, seed: int) -> None:
    choice = random.Random(f"{model} {seed}")
    dtype, floor = choice.choice(FLOORS[model])
    options: dict[str, Any] = {
        "kv_cache_dtype": dtype,
        "kv_cache_floor": floor,
        "block_size": choice.choice([16, 32]),
        "max_model_len": 1024,
        "threads": choice.choice([1, 2]),
    }
    alone = LLM(folders[model], kv_cache_memory_bytes="64MiB", **options)
    sizes = {"block_size": options["block_size"]}
    (row,) = plan(str(folders[model]), 1 << 30, [alone.stats()["kv_cache_dtype"]], 1024, sizes)["formats"]
    crowd = LLM(
        folders[model],
        kv_cache_memory_bytes=int(row["sequence_bytes"] * choice.uniform(1.2, 2.5)),
        max_num_batched_tokens=choice.choice([64, 512]),
        **options,
    )
    conversations = [[choice.randrange(3, VOCABULARY) for _ in range(choice.randrange(100, 300))] for _ in range(8)]
    events = 0
    for turn in range(3):
        prompts = [list(conversation) for conversation in conversations]
        params = [
            SamplingParams(max_tokens=choice.randrange(1, 60), seed=turn, logprobs=2, ignore_eos=True) for _ in prompts
        ]
        answers = [each.outputs[0] for each in crowd.generate(prompts, params)]
        for prompt, param, answer, conversation in zip(prompts, params, answers, conversations, strict=True):
            record = answer.kv_cache
            assert record is not None
            assert len(record.levels) == len(record.pages) == 2 + (floor.count(",") if "k=" not in floor else 0)
            events += len(record.events)
            if record.replayable:
                param.kv_cache_events = record.events
                (again,) = alone.generate([prompt], param)[0].outputs
                assert bits(again) == bits(answer)
                assert again.kv_cache == record
                assert_predictions(alone, prompt, answer)
            conversation += [*answer.token_ids, *(choice.randrange(3, VOCABULARY) for _ in range(20))]
    assert events
    assert crowd.stats()["demotions"] > 0
    assert alone.stats()["preemptions"] == 0


def test_eval_of_levels(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path))
    scheme = "0=int8,floor=int4"
    engine = {"threads": 1, "block_size": 16}
    settings = Settings(formats=[scheme], levels=[0, 0.5, 1], context=256, tokens=512, engine=engine)
    model = str(folders["Llama"])
    rows = evaluate(model, settings)["formats"]
    assert list(rows) == [f"{scheme}, {share} at the floor" for share in ("0%", "50%", "100%")]
    none, half, whole = rows.values()
    (plain,) = evaluate(model, replace(settings, formats=["int8"], levels=[]))["formats"].values()
    assert {**none, "notes": []} == {**plain, "notes": []}
    assert none["kl_mean"] < half["kl_mean"] < whole["kl_mean"]
    assert half["bits_per_element"] == pytest.approx((none["bits_per_element"] + whole["bits_per_element"]) / 2)
    assert whole["bytes_per_token"] < none["bytes_per_token"]


def metric(server: LiveServer, name: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"kvanta:{name}"))


def test_a_server_demotes_before_it_preempts(folders: dict[str, Path]) -> None:
    options = {"kv_cache_floor": "t3+sink=0", "block_size": 16, "max_model_len": 1024}
    folder = str(folders["Llama"])
    with live_server(model=folder, kv_cache_dtype="int8", options={**options, "kv_cache_memory_bytes": "2MiB"}) as big:
        (row,) = plan(folder, 1 << 30, [big.front.loaded.stats()["kv_cache_dtype"]], 400, {"block_size": 16})["formats"]
        memory = 8 * row["sequence_bytes"] + 8 * row["page_bytes"]
        assert memory < 6 * 400 * row["bytes_per_token"]
        sizes = {**options, "kv_cache_memory_bytes": memory}
        with live_server(model=folder, kv_cache_dtype="int8", options=sizes) as server:

            def ask(number: int) -> tuple[dict[str, Any], Any]:
                prompt = np.random.default_rng(number).integers(3, VOCABULARY, 250).tolist()
                body = {"prompt": prompt, "max_tokens": 140, "seed": number, "logprobs": 2, "ignore_eos": True}
                return body, server.post("/v1/completions", **body)

            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(ask, range(16)))
            assert server.front.loaded.stats()["preemptions"] == 0
            assert metric(server, "kv_cache_demotions_total") > 0
            assert metric(server, "kv_cache_demotion_seconds_total") > 0
            assert metric(server, "kv_cache_level_pages") > 0
        assert sum(bool(answer.json()["usage"]["kv_cache"]["choices"][0]["events"]) for _, answer in answers) > 4
        for body, answer in answers:
            assert answer.status_code == 200, answer.text
            record = answer.json()["usage"]["kv_cache"]
            assert record["levels"] == ["int8", "t3+sink=0"]
            (of_choice,) = record["choices"]
            first, floor = of_choice["pages"]
            assert answer.headers["x-kvanta-kv-levels"] == f"int8={first}; t3+sink=0={floor}"
            again = big.completion(**body, kv_cache_events=of_choice["events"])
            assert again["choices"] == answer.json()["choices"]
            assert again["usage"]["kv_cache"] == record


def test_no_events_are_no_demotion(folders: dict[str, Path]) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "block_size": 16, "max_model_len": 512, "threads": 1}
    prompts = [np.random.default_rng(i).integers(3, VOCABULARY, 200).tolist() for i in range(6)]
    plain = LLM(folders["Llama"], **options).generate(prompts, SamplingParams(max_tokens=9, temperature=0, logprobs=1))
    short = LLM(
        folders["Llama"], kv_cache_floor="t3", kv_cache_memory_bytes=500_000, enable_prefix_caching=False, **options
    )
    params = SamplingParams(max_tokens=9, temperature=0, logprobs=1, kv_cache_events=[])
    for expected, answer in zip(plain, short.generate(prompts, params), strict=True):
        assert bits(answer.outputs[0]) == bits(expected.outputs[0])
        assert expected.outputs[0].kv_cache is None
    assert short.stats()["demotions"] == 0


def test_a_plan_has_both_sizes(folders: dict[str, Path]) -> None:
    rows = plan(str(folders["Llama"]), 1 << 30, ["int8", "t3", "0=int8,floor=t3"], 1024)["formats"]
    int8, t3, both = ((row["bytes_per_token"], row["floor_bytes_per_token"]) for row in rows)
    assert both == (int8[0], t3[0])
    assert int8[0] == int8[1]
    assert rows[0]["sequence_bytes"] > rows[2]["sequence_bytes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_floor": "t3"}, "it needs a kv_cache_dtype of one format, the first level, got 'auto'"),
        ({"kv_cache_dtype": "0=int8,64=int4", "kv_cache_floor": "t3"}, "it needs a kv_cache_dtype of one format"),
        ({"kv_cache_ages": "0=int8,64=int4", "kv_cache_floor": "t3"}, "give one of them"),
        ({"kv_cache_dtype": "0=int8,64=int4,floor=t3"}, "ages and a floor do not go together"),
        ({"kv_cache_dtype": "int4", "kv_cache_floor": "int8"}, "no fewer than the"),
        ({"kv_cache_dtype": "int4", "kv_cache_floor": "t3,t2"}, "both later levels take"),
        ({"kv_cache_dtype": "int8", "kv_cache_floor": "int4,t3,t2"}, "at most 3 levels"),
        ({"kv_cache_dtype": "t3", "kv_cache_floor": "t2"}, "must not be a trellis"),
        ({"kv_cache_dtype": "fp8", "kv_cache_floor": "int4"}, "Hadamard"),
        ({"kv_cache_dtype": "bf16", "kv_cache_floor": "nvfp4"}, "nvfp4 has static scales"),
        ({"kv_cache_dtype": "int8", "kv_cache_floor": "int9"}, "int9"),
        ({"kv_cache_dtype": "int8", "kv_cache_floor": "t3", "max_total_tokens": 4096}, "give kv_cache_memory_bytes"),
        (
            {"kv_cache_dtype": "int8", "kv_cache_floor": "t3", "tensor_parallel_size": 2},
            "not supported with kv_cache_floor",
        ),
        (
            {"kv_cache_dtype": "int8", "kv_cache_floor": "t3", "quality_sample_rate": 0.5},
            "not supported with kv_cache_floor",
        ),
    ],
)
def test_refusals_name_the_reason(folders: dict[str, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("+", r"\+")):
        LLM(folders["Llama"], max_model_len=1024, **options)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ("all", "must be a list of events"),
        ([{"position": 64, "pages": [0, 1]}], "must be like"),
        ([{"position": 64, "pages": [0], "level": 1}], "must be like"),
        ([{"position": 64, "pages": [0, -1], "level": 1}], "a page of kv_cache_events"),
        ([{"position": 64, "pages": [0, 9], "level": 1}], "pages are before this position"),
        ([{"position": 64, "pages": [0, 1], "level": 2}], "levels are from 1 to 1"),
        ([{"position": 64, "pages": [0, 1], "level": 1}, {"position": 32, "pages": [0, 1], "level": 1}], "before it"),
    ],
)
def test_events_are_checked(folders: dict[str, Path], events: Any, message: str) -> None:
    options = {"kv_cache_floor": "t3", "block_size": 16, "max_model_len": 256}
    with live_server(model=str(folders["Llama"]), kv_cache_dtype="int8", options=options) as server:
        response = server.post("/v1/completions", prompt=[5, 6, 7], max_tokens=1, kv_cache_events=events)
        assert response.status_code == 400
        assert message in error_of(response)["message"]
        assert error_of(response)["param"] == "kv_cache_events"
    with pytest.raises(InputError, match="n is 2"):
        SamplingParams(n=2, kv_cache_events=[])
