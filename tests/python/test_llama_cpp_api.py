"""llama.cpp's own endpoints, as its server's clients use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, error_of, events, live_server

GREEDY = {"temperature": 0, "n_predict": 6}
CHAT = [{"role": "user", "content": "Lily"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


def complete(server: LiveServer, **body: Any) -> Any:
    """The answer of /completion."""
    response = server.post("/completion", **{**GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_text_and_its_stream(server: LiveServer) -> None:
    answer = complete(server, prompt="Lily", return_tokens=True)
    plain = server.post("/v1/completions", prompt="Lily", temperature=0, max_tokens=6, return_token_ids=True).json()
    assert answer["content"] == plain["choices"][0]["text"]
    assert answer["tokens"] == plain["choices"][0]["token_ids"]
    assert (answer["stop"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 6)
    assert answer["timings"]["predicted_n"] == 6
    assert answer["timings"]["predicted_ms"] > 0
    assert answer["tokens_evaluated"] == plain["usage"]["prompt_tokens"]
    with server.client.stream("POST", "/completion", json={"prompt": "Lily", "stream": True, **GREEDY}) as response:
        pieces = [json.loads(data) for data in events(response)]
    assert "".join(piece["content"] for piece in pieces) == answer["content"]
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1]["stop_type"] == "limit"


def test_prompts_in_every_form(server: LiveServer) -> None:
    ids = server.post("/tokenize", content="Lily", add_special=True).json()["tokens"]
    text = complete(server, prompt="Lily")["content"]
    assert complete(server, prompt=ids)["content"] == text
    assert complete(server, prompt={"prompt_string": "Lily"})["content"] == text
    mixed = complete(server, prompt=["Lily", ids[-1]])
    assert mixed["tokens_evaluated"] == len(ids) + 1
    several = complete(server, prompt=["Lily", "Tom", ids])
    assert [each["index"] for each in several] == [0, 1, 2]
    assert several[0]["content"] == several[2]["content"] == text
    assert server.post("/completions", prompt="Lily", **GREEDY).json()["content"] == text


def test_stops_biases_and_constraints(server: LiveServer) -> None:
    text = complete(server, prompt="Lily")["content"]
    word = text.split()[0]
    stopped = complete(server, prompt="Lily", stop=[word])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    first = complete(server, prompt="Lily", return_tokens=True)["tokens"][0]
    for bias in ([[first, False]], {str(first): -100}):
        assert complete(server, prompt="Lily", logit_bias=bias, return_tokens=True)["tokens"][0] != first
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"]}
    assert json.loads(complete(server, prompt="a", json_schema=schema, n_predict=60)["content"]).keys() == {"n"}
    assert complete(server, prompt="a", grammar='root ::= "yes" | "no"', n_predict=20)["content"] in ("yes", "no")


def test_probabilities(server: LiveServer) -> None:
    entries = complete(server, prompt="Lily", n_probs=3)["completion_probabilities"]
    assert len(entries) == 6
    assert all(len(entry["top_logprobs"]) >= 3 for entry in entries)
    assert entries[0]["logprob"] == max(each["logprob"] for each in entries[0]["top_logprobs"])
    assert bytes(entries[0]["bytes"]).decode(errors="replace") == entries[0]["token"]


def test_hints_and_refusals(server: LiveServer) -> None:
    fields = {"cache_prompt": True, "id_slot": -1, "samplers": ["top_k"], "typical_p": 1.0, "mirostat": 0, "seed": -1}
    response = server.post("/completion", prompt="Lily", **GREEDY, **fields)
    assert response.headers["x-kvanta-ignored"] == "cache_prompt, id_slot, samplers"
    for wrong, said in (
        ({"mirostat": 2}, "mirostat is not supported"),
        ({"dry_multiplier": 0.8}, "dry_multiplier is not supported"),
        ({"repeat_penalty": 0}, "repeat_penalty must be"),
        ({"n_probs": 999}, "--max-logprobs"),
        ({"n_predict": "x"}, "n_predict"),
        ({"grammar": 'root ::= "a"', "json_schema": {"type": "object"}}, "exclude"),
        ({"logit_bias": [1]}, "logit_bias must be pairs"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", "b"], "stream": True}, "one prompt"),
    ):
        response = server.post("/completion", **{"prompt": "Lily", **wrong})
        assert response.status_code == 400, response.text
        assert said in error_of(response)["message"]


def test_filling_in_needs_its_tokens(server: LiveServer) -> None:
    response = server.post("/infill", input_prefix="def f(", input_suffix="): pass", **GREEDY)
    assert response.status_code == 501
    assert "no tokens for filling in the middle" in error_of(response)["message"]


def test_filling_in(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = {"<fim_prefix>": 400, "<fim_suffix>": 401, "<fim_middle>": 402}
    tokenizer = server.front.tokenizer
    monkeypatch.setattr(tokenizer, "token_id", marks.get)
    answer = server.post("/infill", input_prefix="a", input_suffix="b", prompt="c", return_tokens=True, **GREEDY).json()
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in "abc"}
    given = [400, *ids["a"], *ids["c"], 401, *ids["b"], 402]
    assert answer["tokens_evaluated"] == len(given)
    assert answer["tokens"] == complete(server, prompt=given, return_tokens=True)["tokens"]


def test_tokens_and_templates(server: LiveServer) -> None:
    ids = server.post("/tokenize", content="Lily ran").json()["tokens"]
    assert ids == server.front.tokenizer.encode("Lily ran", add_special_tokens=False)
    pieces = server.post("/tokenize", content="Lily ran", with_pieces=True).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    assert server.post("/detokenize", tokens=ids).json()["content"].strip() == "Lily ran"
    prompt = server.post("/apply-template", messages=CHAT).json()["prompt"]
    tokens = server.post("/tokenize", messages=CHAT).json()["tokens"]
    assert tokens == server.front.tokenizer.encode(prompt, add_special_tokens=False)


def test_embeddings(server: LiveServer) -> None:
    one = server.post("/embedding", content="Lily").json()
    openai = server.post("/v1/embeddings", input="Lily").json()["data"][0]["embedding"]
    assert one == [{"index": 0, "embedding": [openai]}]
    assert [each["index"] for each in server.post("/embeddings", content=["Lily", "Tom"]).json()] == [0, 1]


def test_the_state(server: LiveServer) -> None:
    props = server.client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["total_slots"] == len(server.client.get("/slots").json()) == 8
    assert props["chat_template"]
    for path in ("/health", "/v1/health"):
        assert server.client.get(path).json() == {"status": "ok"}
    assert server.client.get("/models").json() == server.client.get("/v1/models").json()
    assert server.post("/chat/completions", messages=CHAT, max_tokens=1).status_code == 200
    assert server.post("/v1/reranking", query="a", documents=["b"]).status_code == 200
