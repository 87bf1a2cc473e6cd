"""The HTTP server on the shipped model: what it answers equals what LLM gives, whoever else asks at the same time."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live_server import CHAT_TEMPLATE, LiveServer, events, live_server, wait_until_idle
from prometheus_client.parser import text_string_to_metric_families

from kvanta import LLM, SamplingParams

PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = LLM("stories260k", kv_cache_memory_bytes="16MiB", threads=1)
    model.tokenizer.use_chat_template(CHAT_TEMPLATE)
    return model


def expected(llm: LLM, prompt: Any = PROMPT, **params: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**params))[0].outputs[0]


def stream(server: LiveServer, path: str, **body: Any) -> list[dict[str, Any]]:
    with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        data = list(events(response))
    assert data.pop() == "[DONE]"
    return [json.loads(line) for line in data]


def test_prompts_of_every_kind(server: LiveServer, llm: LLM) -> None:
    text = expected(llm, **GREEDY).text
    ids = llm.tokenizer.encode(PROMPT)
    for prompt in (PROMPT, ids):
        assert [choice["text"] for choice in server.completion(prompt=prompt, **GREEDY)["choices"]] == [text]
    for prompts in ([PROMPT, "Lily"], [ids, llm.tokenizer.encode("Lily")]):
        choices = server.completion(prompt=prompts, **GREEDY)["choices"]
        assert [choice["text"] for choice in choices] == [text, expected(llm, "Lily", **GREEDY).text]
        assert [choice["index"] for choice in choices] == [0, 1]


def test_shape_of_a_completion(server: LiveServer) -> None:
    answer = server.completion(model="tiny", prompt=PROMPT, **GREEDY)
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "stories260k")
    assert answer["choices"][0]["finish_reason"] == "length"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 24, 29)


def test_a_stream_is_the_whole_in_pieces(server: LiveServer, llm: LLM) -> None:
    chunks = stream(server, "/v1/completions", prompt=PROMPT, stream_options={"include_usage": True}, **GREEDY)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == expected(llm, **GREEDY).text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 24)
    every = stream(
        *(server, "/v1/completions"),
        prompt=PROMPT,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        **GREEDY,
    )
    assert all(chunk["usage"]["prompt_tokens"] == 5 for chunk in every)
    assert "usage" not in stream(server, "/v1/completions", prompt=PROMPT, **GREEDY)[0]


def test_several_texts_with_a_seed(server: LiveServer, llm: LLM) -> None:
    direct = llm.generate(PROMPT, SamplingParams(n=3, seed=7, max_tokens=12))[0].outputs
    body = {"prompt": PROMPT, "n": 3, "seed": 7, "max_tokens": 12, "return_token_ids": True}
    choices = server.completion(**body)["choices"]
    assert [choice["text"] for choice in choices] == [output.text for output in direct]
    assert [choice["token_ids"] for choice in choices] == [output.token_ids for output in direct]
    texts, ids = [""] * 3, [[], [], []]  # type: tuple[list[str], list[list[int]]]
    for chunk in stream(server, "/v1/completions", **body):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ids[choice["index"]] += choice["token_ids"]
    assert texts == [output.text for output in direct]
    assert ids == [output.token_ids for output in direct]
    negative = server.completion(prompt=PROMPT, seed=-2, max_tokens=12)["choices"][0]["text"]
    assert negative == expected(llm, seed=2**64 - 2, max_tokens=12).text
    body = {"prompt": PROMPT, "seed": -1, "temperature": 2, "max_tokens": 24}  # any seed, as in vLLM
    assert len({server.completion(**body)["choices"][0]["text"] for _ in range(3)}) == 3


@pytest.mark.parametrize(
    "params",
    [
        {"stop": "girl"},
        {"stop": ["Lily", "zebra"], "include_stop_str_in_output": True},
        {"stop": [" a "], "min_tokens": 10},
        {"stop_token_ids": [383]},
        {"logit_bias": {"432": -100.0}},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"ignore_eos": True, "max_tokens": 300},
        {"temperature": 1.0, "seed": 3, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_every_parameter_arrives(server: LiveServer, llm: LLM, params: dict[str, Any]) -> None:
    python = dict(params)
    if "logit_bias" in python:
        python["logit_bias"] = {int(token): bias for token, bias in python["logit_bias"].items()}
    direct = expected(llm, **{**GREEDY, **python})
    body = {"prompt": PROMPT, **GREEDY, **params}
    (choice,) = server.completion(**body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (direct.text, direct.finish_reason)
    assert choice["stop_reason"] == direct.stop_reason
    chunks = stream(server, "/v1/completions", **body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == direct.text
    assert chunks[-1]["choices"][0]["finish_reason"] == direct.finish_reason


def test_chat(server: LiveServer, llm: LLM) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Lily"}, {"type": "text", "text": "ran"}]}]
    plain = [{"role": "user", "content": "Lily\nran"}]
    assert llm.chat_prompt(messages) == llm.chat_prompt(plain)
    direct = llm.chat(plain, SamplingParams(temperature=0.0, max_tokens=9, logprobs=1))[0].outputs[0]
    body = {"messages": messages, "temperature": 0, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 1}
    answer = server.post("/v1/chat/completions", **body).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": direct.text}
    tokens = choice["logprobs"]["content"]
    assert [bytes(token["bytes"]).decode() for token in tokens] == [token["token"] for token in tokens]
    assert len(tokens) == 9
    assert len(tokens[0]["top_logprobs"]) == 1
    chunks = stream(server, "/v1/chat/completions", **body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == direct.text
    assert chunks[0]["object"] == "chat.completion.chunk"


def test_a_streamed_chat_has_the_prompts_logprobs(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Lily"}], "temperature": 0, "max_tokens": 4, "prompt_logprobs": 1}
    whole = server.post("/v1/chat/completions", **body).json()["prompt_logprobs"]
    assert (whole[0], len(whole[1])) == (None, 2)
    chunks = stream(server, "/v1/chat/completions", **body, n=2)
    assert [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk] == [whole]


def test_chat_without_a_limit_fills_the_context(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Lily"}], "temperature": 0, "ignore_eos": True}
    usage = server.post("/v1/chat/completions", **body).json()["usage"]
    assert usage["total_tokens"] == 512


def test_prefill_and_tools_reach_the_template(server: LiveServer) -> None:
    def prompt(**body: Any) -> str:
        tokens = server.post("/tokenize", **body).json()["tokens"]
        text: str = server.post("/detokenize", tokens=tokens).json()["prompt"]
        return text.removeprefix("<s>").strip()

    user = {"role": "user", "content": "Hi"}
    assert prompt(messages=[user]) == "user: Hi\nassistant:"
    assert prompt(messages=[user], add_generation_prompt=False) == "user: Hi"
    tools = [{"type": "function", "function": {"name": "walk"}}]
    assert prompt(messages=[user], tools=tools) == "walk user: Hi\nassistant:"
    assert prompt(messages=[user], tools=tools, tool_choice="none") == "user: Hi\nassistant:"
    started = [user, {"role": "assistant", "content": "She said "}]
    assert prompt(messages=started, continue_final_message=True) == "user: Hi\nassistant: She said"
    body = {"messages": started, "continue_final_message": True, "echo": True, "max_tokens": 2}
    content = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    assert content.startswith("She said ")
    parts = [{"type": "text", "text": text} for text in ("She", "said ")]
    body["messages"] = [user, {"role": "assistant", "content": parts}]
    content = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    assert content.startswith("She\nsaid ")


COLOURS = {
    "type": "object",
    "properties": {"a": {"enum": ["red", "blue"]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOURS}}},
        {"structured_outputs": {"json": COLOURS}},
        {"guided_json": json.dumps(COLOURS)},
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"regex": "[0-9]{3}"}},
    ],
)
def test_texts_of_a_form(server: LiveServer, form: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 100, "seed": 1, "n": 2, **form}
    for choice in server.completion(**body)["choices"]:
        assert choice["finish_reason"] == "stop"
        if "choice" in str(form):
            assert choice["text"] in ("yes", "no")
        elif "regex" in str(form):
            assert re.fullmatch("[0-9]{3}", choice["text"])
        else:
            assert json.loads(choice["text"])["a"] in ("red", "blue")
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, **form, "stream": True}
    chunks = stream(server, "/v1/chat/completions", **chat)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_prefixes_are_shared_within_a_salt_only(server: LiveServer) -> None:
    prompt = [1, *range(100, 300)]

    def cached(salt: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        usage = server.completion(**body)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached("a"), cached("a"), cached("b"), cached("b")] == [0, 192, 0, 192]


def test_greedy_texts_do_not_depend_on_who_else_asks_or_leaves(server: LiveServer, llm: LLM) -> None:
    generator = random.Random(5)
    prompts = [[1, *generator.choices(range(3, 512), k=generator.randrange(1, 200))] for _ in range(40)]
    lengths = [generator.randrange(1, 60) for _ in prompts]
    leaves = [generator.random() < 0.25 for _ in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=length) for length in lengths]
    direct = [output.outputs[0].text for output in llm.generate(prompts, params)]

    def ask(index: int) -> str:
        body = {"prompt": prompts[index], "temperature": 0, "max_tokens": lengths[index]}
        if not leaves[index]:
            return str(server.completion(**body)["choices"][0]["text"])
        long = {**body, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=long) as response:
            assert next(events(response))
        return direct[index]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(len(prompts)))) == direct
    wait_until_idle(server)


def test_models_version_health(server: LiveServer) -> None:
    models = server.client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["stories260k", "tiny"]
    assert models["data"][0]["max_model_len"] == 512
    assert server.client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert server.client.get("/v1/models/other").status_code == 404
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ping").status_code == server.client.post("/ping").status_code == 200
    assert server.client.get("/version").json().keys() == {"version"}
    assert "/v1/completions" in server.client.get("/openapi.json").json()["paths"]


def test_metrics(server: LiveServer) -> None:
    def read() -> dict[str, float]:
        text = server.client.get("/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        extra = ("finished_reason", "status", "le", "endpoint")
        return {
            "/".join([sample.name, *(sample.labels[key] for key in extra if key in sample.labels)]): sample.value
            for sample in samples
            if "layer" not in sample.labels
        }

    wait_until_idle(server)
    before = read()
    for _ in range(2):
        server.completion(prompt=[1, *range(10, 110)], temperature=0, max_tokens=5, ignore_eos=True)
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["kvanta:prompt_tokens_total"] == grown["kvanta:prefix_cache_queries_total"] == 202
    assert grown["kvanta:prefix_cache_hits_total"] == 64
    assert grown["kvanta:generation_tokens_total"] == 10
    assert grown["kvanta:time_to_first_token_seconds_count"] == 2
    assert grown["kvanta:inter_token_latency_seconds_count"] == 8
    assert 0 < after["kvanta:inter_token_latency_max_seconds"] < 60
    assert grown["kvanta:e2e_request_latency_seconds_bucket/+Inf"] == 2
    assert grown["kvanta:request_prompt_tokens_sum"] == 202
    assert grown["kvanta:request_success_total/length"] == 2
    assert grown["kvanta:http_responses_total/200//v1/completions"] == 2
    assert after["kvanta:num_requests_running"] == 0
    assert after["kvanta:kv_cache_pages_used"] == after["kvanta:kv_cache_prefix_pages"]
    layers = [line for line in server.client.get("/metrics").text.splitlines() if "kv_saturated_values_total{" in line]
    assert len(layers) == 2 * 5
    openmetrics = server.client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert openmetrics.text.endswith("# EOF\n")


def test_the_page_is_served(server: LiveServer) -> None:
    index = server.client.get("/")
    assert index.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in index.headers["content-security-policy"]
    for name in re.findall(r'(?:src|href)="(page/[^"]+)"', index.text):
        assert server.client.get(f"/{name}").status_code == 200
    assert server.client.get("/page/nothing.js").status_code == 404
    assert server.client.get("/v1/completions").status_code == 405  # the page does not hide it


def test_load_is_the_number_of_open_requests(server: LiveServer) -> None:
    def load() -> int:
        return int(server.client.get("/load").json()["server_load"])

    def load_while_open() -> int:
        body = {"prompt": PROMPT, "n": 8, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # closes the stream when nobody has it any more
            next(lines)
            return load()

    assert load() == 0
    assert any(load_while_open() == 1 for _ in range(20))  # of a fast engine, a request may have ended by then
    wait_until_idle(server)
    assert load() == 0
