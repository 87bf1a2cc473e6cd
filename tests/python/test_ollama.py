"""Ollama's API: chats, texts, embeddings and models, as its clients send them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, error_of, live_server

from kvanta.server.ollama.bodies import OllamaChat

CHAT = [{"role": "user", "content": "Lily"}]
GREEDY = {"temperature": 0, "num_predict": 6}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 1}}, "required": ["n"]}
TOOL = {
    "type": "function",
    "function": {"name": "walk", "description": "Walks.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(tool_call_parser="hermes") as running:
        yield running


def lines(server: LiveServer, path: str, **body: Any) -> list[dict[str, Any]]:
    """The objects of a stream, which is the default."""
    with server.client.stream("POST", path, json={"model": "tiny", **body}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("application/x-ndjson")
        return [json.loads(line) for line in response.iter_lines() if line]


def whole(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    """The answer in one piece."""
    response = server.post(path, **{"model": "tiny", "stream": False, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_stream_says_what_a_whole_answer_says(server: LiveServer) -> None:
    answer = whole(server, "/api/chat", messages=CHAT, options=GREEDY)
    pieces = lines(server, "/api/chat", messages=CHAT, options=GREEDY)
    assert "".join(piece["message"]["content"] for piece in pieces) == answer["message"]["content"] != ""
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for last in (answer, pieces[-1]):
        assert (last["done_reason"], last["eval_count"], last["model"]) == ("length", 6, "tiny")
        assert last["total_duration"] >= last["prompt_eval_duration"] > 0
        assert last["total_duration"] >= last["eval_duration"] > 0
        assert last["prompt_eval_count"] > 0
    openai = server.post("/v1/chat/completions", messages=CHAT, temperature=0, max_tokens=6).json()
    assert openai["choices"][0]["message"]["content"] == answer["message"]["content"]


def test_texts_with_the_template_and_without(server: LiveServer) -> None:
    through = whole(server, "/api/generate", prompt="Lily", options=GREEDY)["response"]
    assert through == whole(server, "/api/chat", messages=CHAT, options=GREEDY)["message"]["content"]
    raw = whole(server, "/api/generate", prompt="Lily", raw=True, options=GREEDY)["response"]
    plain = server.post("/v1/completions", prompt="Lily", temperature=0, max_tokens=6).json()["choices"][0]["text"]
    assert raw == plain
    pieces = lines(server, "/api/generate", prompt="Lily", raw=True, options=GREEDY)
    assert "".join(piece["response"] for piece in pieces) == raw
    assert pieces[-1]["done"]
    system = whole(server, "/api/generate", prompt="Lily", system="Sing.", options=GREEDY)
    both = [{"role": "system", "content": "Sing."}, *CHAT]
    assert system["response"] == whole(server, "/api/chat", messages=both, options=GREEDY)["message"]["content"]


def test_formats_hold(server: LiveServer) -> None:
    options = {"num_predict": 60, "seed": 1}
    content = whole(server, "/api/chat", messages=CHAT, format=SCHEMA, options=options)["message"]["content"]
    assert json.loads(content).keys() == {"n"}
    for wrong in ("xml", 5):
        response = server.post("/api/chat", model="tiny", messages=CHAT, format=wrong)
        assert response.status_code == 400
        assert "format must be 'json' or a JSON schema" in response.json()["error"]


def test_options_are_parameters_or_hints(server: LiveServer) -> None:
    options = {**GREEDY, "num_ctx": 4096, "num_thread": 4, "flavour": "sweet", "stop": [], "seed": -1}
    response = server.post("/api/chat", model="tiny", messages=CHAT, stream=False, options=options, keep_alive="5m")
    assert response.status_code == 200, response.text
    assert response.headers["x-kvanta-ignored"] == "keep_alive, options.num_ctx, options.num_thread, options.flavour"
    for wrong, said in (
        ({"mirostat": 2}, "options.mirostat is not supported"),
        ({"temperature": -1}, "options.temperature must be"),
        ({"num_predict": "many"}, "options.num_predict"),
    ):
        response = server.post("/api/chat", model="tiny", messages=CHAT, options=wrong)
        assert response.status_code == 400
        assert said in response.json()["error"], response.text


def test_calls_have_objects_for_arguments(server: LiveServer) -> None:
    tokenizer = server.front.tokenizer
    kept = tokenizer.chat_template
    tokenizer.use_chat_template(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.to }} {{ c.id }}]{% endfor %}"
        "{% if m.tool_call_id %}<{{ m.tool_call_id }} {{ m.name }}>{% endif %}\n{% endfor %}"
    )
    call = {"function": {"name": "walk", "arguments": {"to": "home"}}}
    result = {"role": "tool", "tool_name": "walk", "content": "There."}
    messages = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    try:
        answer = whole(server, "/api/chat", messages=messages, tools=[TOOL], options={"num_predict": 1})
        assert answer["prompt_eval_count"] > 0
        chat = {"messages": messages, "options": {"num_predict": 1}}
        assert lines(server, "/api/chat", **chat)[-1]["done"]
    finally:
        tokenizer.chat_template = kept
    text = '<tool_call>{"name": "walk", "arguments": {"to": "x"}}</tool_call>'
    given = {
        "messages": CHAT,
        "tools": [TOOL],
        "options": {"num_predict": 80},
        "structured_outputs": {"choice": [text]},
    }
    found = whole(server, "/api/chat", **given)["message"]
    assert [each["function"] for each in found["tool_calls"]] == [{"name": "walk", "arguments": {"to": "x"}}]
    streamed = [piece["message"] for piece in lines(server, "/api/chat", **given)]
    calls = [each["function"] for message in streamed for each in message.get("tool_calls", [])]
    assert calls == [{"name": "walk", "arguments": {"to": "x"}}]


def test_thinking_is_apart() -> None:
    with live_server(reasoning_parser="deepseek_r1") as server:
        text = {"structured_outputs": {"choice": ["I think.</think>Yes."]}, "options": {"num_predict": 90}}
        server.front.tokenizer.use_chat_template("{{ messages[0].content }}<think>\n")
        pieces = [piece["message"] for piece in lines(server, "/api/chat", messages=CHAT, think=True, **text)]
        assert {"thinking"} <= set().union(*pieces)
        assert "".join(piece.get("thinking", "") for piece in pieces) != ""


def test_embeddings(server: LiveServer) -> None:
    two = whole(server, "/api/embed", input=["Lily", "Tom"])
    assert (two["model"], len(two["embeddings"])) == ("tiny", 2)
    assert two["prompt_eval_count"] > 0
    one = whole(server, "/api/embeddings", prompt="Lily")["embedding"]
    assert one == two["embeddings"][0]
    assert len(whole(server, "/api/embed", input="Lily", dimensions=8)["embeddings"][0]) == 8
    long = "Lily " * 2000
    assert server.post("/api/embed", model="tiny", input=long).status_code == 200
    assert server.post("/api/embed", model="tiny", input=long, truncate=False).status_code == 400


def test_models(server: LiveServer) -> None:
    cards = server.client.get("/api/tags").json()["models"]
    assert [card["name"] for card in cards] == ["stories260k:latest", "tiny:latest"]
    assert cards[0]["digest"] != cards[1]["digest"]
    assert cards[0]["details"]["parameter_size"] == "0M"
    assert {card["name"] for card in server.client.get("/api/ps").json()["models"]} == {card["name"] for card in cards}
    shown = server.post("/api/show", model="tiny:latest").json()
    assert shown["capabilities"] == ["completion", "embedding", "tools"]
    assert shown["model_info"]["llama.context_length"] == 512
    assert server.client.get("/api/version").json()["version"].count(".") == 2
    assert whole(server, "/api/chat", model="tiny:latest", messages=CHAT, options=GREEDY)["model"] == "tiny:latest"
    assert whole(server, "/api/generate", prompt="")["done_reason"] == "load"
    assert whole(server, "/api/chat", messages=[], keep_alive=0)["done_reason"] == "unload"
    assert lines(server, "/api/pull") == [{"status": "success"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": CHAT}),
        ("/api/generate", {"prompt": "Lily"}),
        ("/api/generate", {"prompt": "Lily", "raw": True}),
    ],
)
def test_log_probabilities(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    asked = {**body, "options": GREEDY, "logprobs": True}
    entries = whole(server, path, **asked, top_logprobs=2)["logprobs"]
    assert len(entries) == 6
    for entry in entries:
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert (len(entry["top_logprobs"]), entry["top_logprobs"][0]["logprob"]) == (2, entry["logprob"])
    pieces = lines(server, path, **asked, top_logprobs=2)
    assert [entry for piece in pieces for entry in piece.get("logprobs", ())] == entries
    assert all("top_logprobs" not in entry for entry in whole(server, path, **asked)["logprobs"])
    assert "logprobs" not in whole(server, path, **body, options=GREEDY, top_logprobs=2)
    refused = server.post(path, model="tiny", **asked, top_logprobs=99)
    assert "--max-logprobs" in refused.json()["error"]


def test_filling_in(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "a", "suffix": "b", "options": GREEDY}
    refused = server.post("/api/generate", model="tiny", **body)
    assert (refused.status_code, "does not support insert" in refused.json()["error"]) == (400, True)
    tokenizer = server.front.tokenizer
    monkeypatch.setattr(tokenizer, "token_id", {"<fim_prefix>": 400, "<fim_suffix>": 401, "<fim_middle>": 402}.get)
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in "ab"}
    given = [tokenizer.bos_id, 400, *ids["a"], 401, *ids["b"], 402]
    plain = server.post("/v1/completions", prompt=given, temperature=0, max_tokens=6).json()["choices"][0]["text"]
    assert whole(server, "/api/generate", **body)["response"] == plain
    assert whole(server, "/api/generate", **{**body, "suffix": ""})["response"] != plain
    choices = server.post("/v1/completions", prompt=["a", "a"], suffix="b", temperature=0, max_tokens=6).json()[
        "choices"
    ]
    assert [choice["text"] for choice in choices] == [plain, plain]
    assert error_of(server.post("/v1/completions", prompt=[5], suffix="b"))["param"] == "prompt"
    assert "insert" in server.post("/api/show", model="tiny").json()["capabilities"]
    assert "exclude" in server.post("/api/generate", model="tiny", **body, system="c").json()["error"]


def test_the_latest_tag_in_every_api(server: LiveServer) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 1}),
        ("/v1/embeddings", {"input": "a"}),
        ("/completion", {"prompt": "a", "n_predict": 1}),
        ("/tokenize", {"prompt": "a"}),
        ("/api/embed", {"input": "a"}),
    ):
        assert server.post(path, model="tiny:latest", **body).status_code == 200, path
        assert server.post(path, model="tiny:small", **body).status_code == 404, path
    assert server.client.get("/v1/models/tiny:latest").json()["id"] == "tiny:latest"


def test_reasoning_as_a_text(server: LiveServer) -> None:
    for think, fields in (("false", {"enable_thinking": False}), ("True", {"enable_thinking": True})):
        chat = OllamaChat(model="tiny", messages=CHAT, think=think).chat()
        assert (chat.model_extra, chat.reasoning_effort) == (fields, None)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "/api/chat", {"model": "llama3", "messages": CHAT}, 404, "there is no model 'llama3' here"),
        ("POST", "/api/chat", {"messages": CHAT}, 400, "model is required"),
        ("POST", "/api/chat", {"model": "tiny", "messages": "a"}, 400, "messages must be a list of objects"),
        ("POST", "/api/chat", {"model": "tiny", "messages": [{"role": "user", "images": ["AA"]}]}, 400, "image"),
        ("POST", "/api/generate", {"model": "tiny", "prompt": "a", "context": [1]}, 400, "context is not supported"),
        ("POST", "/api/generate", {"model": "tiny", "prompt": "a", "raw": True, "system": "b"}, 400, "exclude"),
        ("POST", "/api/show", {}, 400, "model is required"),
        ("POST", "/api/pull", {"model": "llama3"}, 404, "kvanta serve MODEL"),
        ("POST", "/api/push", {"model": "tiny"}, 501, "is not implemented"),
        ("POST", "/api/create", {"model": "a", "from": "b"}, 501, "is not implemented"),
        ("DELETE", "/api/delete", {"model": "tiny"}, 501, "is not implemented"),
        ("GET", "/api/other", None, 404, "there is no endpoint"),
    ],
)
def test_errors_have_ollamas_form(
    server: LiveServer, method: str, path: str, body: Any, status: int, said: str
) -> None:
    response = server.client.request(method, path, json=body)
    assert response.status_code == status, response.text
    error = response.json()
    assert error.keys() == {"error"}
    assert said in error["error"]
