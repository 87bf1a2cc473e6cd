"""llama.cpp's own endpoints, as its server's clients use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, events, live_server

from kvanta.server.llama_cpp.bodies import LlamaInfill

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
        ({"post_sampling_probs": True}, "post_sampling_probs is not supported"),
        ({"t_max_predict_ms": 500}, "t_max_predict_ms is not supported"),
        ({"n_indent": 4}, "n_indent is not supported"),
        ({"min_keep": 2}, "min_keep is not supported"),
        ({"image_data": [{"id": 1, "data": "AA"}]}, "image_data is not supported"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["AA"]}}, "multimodal_data"),
        ({"response_fields": "content"}, "response_fields must be a list"),
        ({"prompt": [5] * 513}, "max_model_len"),
    ):
        response = server.post("/completion", **{"prompt": "Lily", **wrong})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert said in error["message"]
        kind = "exceed_context_size_error" if said == "max_model_len" else "invalid_request_error"
        sizes = {"n_prompt_tokens": 513, "n_ctx": 512} if said == "max_model_len" else {}
        assert error == {"code": 400, "message": error["message"], "type": kind, **sizes}
    error = server.post("/completion", prompt="word " * 3000).json()["error"]
    assert error["n_prompt_tokens"] > error["n_ctx"] == 512
    off = {"post_sampling_probs": False, "t_max_predict_ms": 0, "n_indent": 0, "min_keep": 0, "image_data": []}
    response = server.post("/completion", prompt="Lily", **GREEDY, **off, return_progress=True)
    assert (response.status_code, response.headers["x-kvanta-ignored"]) == (200, "return_progress")


def test_settings_of_an_answer(server: LiveServer) -> None:
    given = {"top_k": 7, "stop": ["zzz"], "repeat_penalty": 1.1, "logit_bias": [[5, -1.5]], "seed": 3, "n_probs": 2}
    settings = complete(server, prompt="Lily", **given)["generation_settings"]
    assert {name: settings[name] for name in given} == {**given, "logit_bias": [{"token": 5, "bias": -1.5}]}
    assert (settings["n_predict"], settings["temperature"], settings["mirostat"]) == (6, 0.0, 0)
    props = server.client.get("/props").json()["default_generation_settings"]["params"]
    assert props.keys() == settings.keys()
    assert props["n_predict"] == -1


def test_fields_of_an_answer(server: LiveServer) -> None:
    fields = ["content", "generation_settings/top_k", "timings/prompt_n", "timings/none", "content/none", ""]
    whole = complete(server, prompt="Lily", top_k=5)
    answer = complete(server, prompt="Lily", top_k=5, response_fields=fields)
    assert answer.keys() == {"content", "top_k", "prompt_n"}
    assert (answer["content"], answer["top_k"]) == (whole["content"], 5)
    body = {"prompt": "Lily", "stream": True, "response_fields": ["stop_type"], **GREEDY}
    with server.client.stream("POST", "/completion", json=body) as response:
        pieces = [json.loads(data) for data in events(response)]
    assert pieces[-1] == {"stop_type": "limit"}
    assert "".join(piece["content"] for piece in pieces[:-1]) == whole["content"]


def test_a_stream_of_several_prompts(server: LiveServer) -> None:
    prompts = ["Lily", "Tom and Lily ran", "Once"]
    whole = complete(server, prompt=prompts)
    assert [each["prompt"] for each in whole] == prompts
    with server.client.stream("POST", "/completion", json={"prompt": prompts, "stream": True, **GREEDY}) as response:
        pieces = [json.loads(data) for data in events(response)]
    for index, each in enumerate(whole):
        own = [piece for piece in pieces if piece["index"] == index]
        assert "".join(piece["content"] for piece in own) == each["content"]
        assert [piece["stop"] for piece in own] == [False] * (len(own) - 1) + [True]
        assert (own[-1]["prompt"], own[-1]["tokens_evaluated"]) == (prompts[index], each["tokens_evaluated"])


def test_a_prompt_alone(server: LiveServer) -> None:
    answer = complete(server, prompt="Lily", n_predict=0, return_tokens=True, n_probs=1)
    assert (answer["content"], answer["tokens"], answer["tokens_predicted"]) == ("", [], 0)
    assert (answer["stop_type"], answer["generation_settings"]["n_predict"]) == ("limit", 0)
    body = {"prompt": "Lily", "n_predict": 0, "stream": True}
    with server.client.stream("POST", "/completion", json=body) as response:
        (piece,) = [json.loads(data) for data in events(response)]
    assert (piece["stop"], piece["content"]) == (True, "")


def test_filling_in_needs_its_tokens(server: LiveServer) -> None:
    response = server.post("/infill", input_prefix="def f(", input_suffix="): pass", **GREEDY)
    assert response.status_code == 501
    error = response.json()["error"]
    assert (error["code"], error["type"]) == (501, "not_supported_error")
    assert "no tokens for filling in the middle" in error["message"]


def test_filling_in(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = {"<fim_prefix>": 400, "<fim_suffix>": 401, "<fim_middle>": 402}
    tokenizer = server.front.tokenizer
    monkeypatch.setattr(tokenizer, "token_id", marks.get)
    body = {"input_prefix": "a", "input_suffix": "b", "prompt": "c"}
    answer = server.post("/infill", **body, return_tokens=True, **GREEDY).json()
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in "abc"}
    given = [tokenizer.bos_id, 400, *ids["a"], *ids["c"], 401, *ids["b"], 402]
    assert answer["tokens_evaluated"] == len(given)
    assert answer["tokens"] == complete(server, prompt=given, return_tokens=True)["tokens"]
    editors = {"n_indent": 4, "t_max_predict_ms": 250, "response_fields": ["content"], "samplers": []}
    answer = server.post("/infill", **body, **GREEDY, **editors)
    assert answer.json().keys() == {"content"}
    assert answer.headers["x-kvanta-ignored"] == "n_indent, t_max_predict_ms, samplers"
    for wrong in ({"input_extra": "a"}, {"input_extra": [{"text": 5}]}, {"input_suffix": 5}, {"prompt": ["a"]}):
        assert server.post("/infill", **{**body, **wrong}).status_code == 400


def test_filling_in_among_other_files(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.front.tokenizer
    marks = {"<|fim_prefix|>": 400, "<|fim_suffix|>": 401, "<|fim_middle|>": 402}
    files = [{"filename": "a.py", "text": "one"}, {"text": "two"}]
    body: dict[str, Any] = {"input_prefix": "a", "input_suffix": "b", "input_extra": files}

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    bos, question = tokenizer.bos_id, [400, *ids("a"), 401, *ids("b"), 402]
    repository = [403, *ids("myproject\n"), 404, *ids("a.py\n"), *ids("one"), 404, *ids("tmp\n"), *ids("two")]
    snippet = ids("\n\n--- snippet ---\n\n")
    for more, others in (
        ({"<|repo_name|>": 403, "<|file_sep|>": 404}, [*repository, 404, *ids("filename\n")]),
        ({}, [*snippet, *ids("one"), *snippet, *ids("two")]),
    ):
        monkeypatch.setattr(tokenizer, "token_id", {**marks, **more}.get)
        assert LlamaInfill(**body).filled(tokenizer, 512) == [bos, *others, *question]
        short = LlamaInfill(**body, n_predict=6).filled(tokenizer, len(question) + 10)
        assert short == [bos, *others[-3:], *question]
        assert server.post("/infill", **body, **GREEDY).json()["tokens_evaluated"] == len(others) + len(question) + 1


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
