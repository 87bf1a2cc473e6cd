"""Calls of clients that are too large to be installed for tests, as their sources make them, and what they read.

Open WebUI 0.12.4, lm_eval 0.4.13, `vllm bench serve` 0.32 and SGLang's benchmark 0.5.23; docs/clients.md tells what was
run with the clients themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, events, live_server

MODEL = "stories260k"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Lily"}]
TITLE = """### Task:
Generate a concise title summarizing the chat history.
### Output:
JSON format: { "title": "your concise title here" }
### Chat History:
<chat_history>
USER: Lily
ASSISTANT: went to the park.
</chat_history>"""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


def stream(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Data of all events but [DONE], which must be the last one."""
    with server.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        data = list(events(response))
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


def test_open_webui(server: LiveServer) -> None:
    """A connection is verified by the list of models; then come a chat as a stream, and tasks as whole answers."""
    (card, _) = server.client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"]) == (MODEL, "model")
    settings: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 0.9,
        "min_p": 0.0,
        "max_tokens": 12,
        "frequency_penalty": 0.0,
    }
    settings |= {
        "presence_penalty": 0.0,
        "seed": 5,
        "stop": ["\n\n"],
        "logit_bias": {"5": 1},
        "reasoning_effort": "medium",
    }
    settings |= {"user": {"name": "a", "id": "b", "email": "c", "role": "user"}}
    body = {"model": MODEL, "messages": CHAT, "stream": True, "stream_options": {"include_usage": True}, **settings}
    chunks = stream(server, "/v1/chat/completions", body)
    assert all({"id", "object", "created", "model", "choices"} <= chunk.keys() for chunk in chunks)
    assert "".join(each["delta"].get("content") or "" for chunk in chunks for each in chunk["choices"])
    assert [each["finish_reason"] for chunk in chunks for each in chunk["choices"]][-1] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    task = {"model": MODEL, "messages": [{"role": "user", "content": TITLE}], "stream": False, "max_tokens": 30}
    for more in ({}, {"response_format": {"type": "json_object"}}):
        answer = server.post("/v1/chat/completions", **task, **more).json()
        assert isinstance(answer["choices"][0]["message"]["content"], str)


def test_open_webui_by_responses(server: LiveServer) -> None:
    text = [{"type": "output_text", "text": "Hello."}]
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Lily"}]},
        {"type": "message", "role": "assistant", "content": text},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "5"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And?"}]},
    ]
    tools = [{"type": "function", "name": "f", "description": "", "parameters": {"type": "object"}, "strict": False}]
    body = {"model": MODEL, "input": items, "instructions": "Be brief.", "max_output_tokens": 8, "tools": tools}
    answer = server.post("/v1/responses", **body, temperature=0.5, stream=False).json()
    assert {"error", "id", "output", "usage"} <= answer.keys()
    assert answer["output"][0]["content"][0]["text"]


def test_lm_eval(server: LiveServer) -> None:
    """Likelihoods of continuations, with the server's tokenizer."""
    info = server.client.get("/tokenizer_info").json()

    def encode(text: str) -> list[int]:
        answer = server.post("/tokenize", prompt=text, add_special_tokens=False).json()
        ids: list[int] = answer["tokens"]
        return ids

    assert len(encode(info["eos_token"])) == len(encode(info["bos_token"])) == 1
    context, continuation = encode("Once upon a time"), encode("Once upon a time, there was a")[4:]
    prompts = [[*context, *continuation], [*context, *reversed(continuation)]]
    scored = {
        "model": MODEL,
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    sums = []
    for choice in server.completion(**scored)["choices"]:
        logprobs = choice["logprobs"]
        begin = len(context)
        tokens, tops = logprobs["token_logprobs"][begin:-1], logprobs["top_logprobs"][begin:-1]
        assert len(tokens) == len(tops) == len(continuation)
        sums.append((sum(tokens), all(token == max(top.values()) for token, top in zip(tokens, tops, strict=True))))
    assert sums[0][0] > sums[1][0]
    assert [greedy for _, greedy in sums] == [True, False]
    asked = {"model": MODEL, "prompt": [context], "max_tokens": 9, "temperature": 0, "stop": [".", info["eos_token"]]}
    assert server.completion(**asked, seed=1234)["choices"][0]["text"].startswith(", there was")


def test_vllm_bench_serve(server: LiveServer) -> None:
    common = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    text = {**common, "prompt": "Once upon a time", "repetition_penalty": 1.0, "max_tokens": 6, "logprobs": None}
    chat = {
        **common,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "max_completion_tokens": 6,
    }
    for path, body in (("/v1/completions", text), ("/v1/chat/completions", chat)):
        chunks = stream(server, path, body)
        assert chunks[-1]["usage"]["completion_tokens"] == 6
        assert any(chunk["choices"] for chunk in chunks)


def test_sglangs_benchmark(server: LiveServer) -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
    asked = {"text": "Once upon a time", "sampling_params": sampling, "stream": True, "lora_path": None}
    asked |= {"return_logprob": False, "return_routed_experts": False, "logprob_start_len": -1}
    chunks = stream(server, "/generate", asked)
    assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks][-1] == 6
    assert chunks[-1]["text"].startswith(chunks[0]["text"])
    assert server.client.post("/flush_cache", params={"timeout": 5}).status_code == 200
    assert server.client.get("/server_info").json()["internal_states"]
    oai = {
        "model": MODEL,
        "prompt": "a",
        "best_of": 1,
        "max_tokens": 4,
        "stream": True,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    assert "".join(chunk["choices"][0]["text"] for chunk in stream(server, "/v1/completions", oai))
