"""SGLang's own endpoints, and vLLM's /tokenizer_info."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import CHAT_TEMPLATE, LiveServer, error_of, events, live_server

PROMPT = "Once upon a time"
GREEDY = {"temperature": 0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


def generate(server: LiveServer, **body: Any) -> Any:
    response = server.post("/generate", **body)
    assert response.status_code == 200, response.text
    return response.json()


def whole_pages(server: LiveServer, prompt_tokens: int) -> int:
    """Tokens that a prompt finds in the prefix cache when it has been computed before: at least one is left."""
    page_size = server.front.loaded.engine.config.page_size
    return (prompt_tokens - 1) // page_size * page_size


def test_the_text_is_that_of_completions(server: LiveServer) -> None:
    expected = server.completion(prompt=PROMPT, temperature=0, max_tokens=12, return_token_ids=True)["choices"][0]
    answer = generate(server, text=PROMPT, sampling_params=GREEDY)
    assert answer["text"] == expected["text"]
    assert answer["output_ids"] == expected["token_ids"]
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(expected["prompt_token_ids"]), 12)
    from_ids = generate(server, input_ids=expected["prompt_token_ids"], sampling_params=GREEDY)
    assert from_ids["output_ids"] == answer["output_ids"]
    assert from_ids["meta_info"]["cached_tokens"] == whole_pages(server, len(expected["prompt_token_ids"]))


def test_batches_and_several_texts(server: LiveServer) -> None:
    both = generate(server, text=[PROMPT, "The dog"], sampling_params=[GREEDY, GREEDY])
    assert both[0]["text"] == generate(server, text=PROMPT, sampling_params=GREEDY)["text"]
    assert both[1]["text"] == generate(server, text="The dog", sampling_params=GREEDY)["text"]
    three = generate(server, text=PROMPT, sampling_params={**GREEDY, "n": 3})
    assert [each["text"] for each in three] == [both[0]["text"]] * 3
    assert isinstance(generate(server, text=[PROMPT], sampling_params=GREEDY), list)


def test_special_tokens_of_the_prompt(server: LiveServer) -> None:
    counts = [
        server.post("/generate", text="a b", sampling_params={"max_new_tokens": 1, "add_special_tokens": each}).json()[
            "meta_info"
        ]["prompt_tokens"]
        for each in (True, False)
    ]
    assert counts[0] == counts[1] + 1


def test_a_stream_has_the_text_so_far(server: LiveServer) -> None:
    whole = generate(server, text=PROMPT, sampling_params=GREEDY)
    body = {"text": PROMPT, "sampling_params": GREEDY, "stream": True}
    with server.client.stream("POST", "/generate", json=body) as response:
        *chunks, done = events(response)
    assert done == "[DONE]"
    found = [json.loads(chunk) for chunk in chunks]
    for before, after in itertools.pairwise(found):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    assert found[-1]["text"] == whole["text"]
    assert found[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    body = {**body, "text": [PROMPT, "The dog"]}
    with server.client.stream("POST", "/generate", json=body) as response:
        last = {chunk["index"]: chunk["text"] for chunk in map(json.loads, list(events(response))[:-1])}
    assert last == {0: whole["text"], 1: generate(server, text="The dog", sampling_params=GREEDY)["text"]}


def test_logprobs(server: LiveServer) -> None:
    body: dict[str, Any] = {"text": PROMPT, "sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2}
    expected = server.completion(
        prompt=PROMPT, temperature=0, max_tokens=12, logprobs=2, echo=True, return_token_ids=True
    )["choices"][0]
    answer = generate(server, **body, logprob_start_len=0, return_text_in_logprobs=True)["meta_info"]
    ids = expected["prompt_token_ids"]
    assert [each[1] for each in answer["input_token_logprobs"]] == ids
    values = [each[0] for each in (*answer["input_token_logprobs"], *answer["output_token_logprobs"])]
    assert values == expected["logprobs"]["token_logprobs"]
    assert [each[2] for each in answer["output_token_logprobs"]] == expected["logprobs"]["tokens"][len(ids) :]
    assert answer["input_top_logprobs"][0] is None
    assert {len(each) for each in answer["output_top_logprobs"]} == {2}
    later = generate(server, **body, logprob_start_len=2)["meta_info"]
    assert later["input_token_logprobs"][0] == [None, ids[2], None]
    assert [each[0] for each in later["input_token_logprobs"][1:]] == values[3 : len(ids)]
    assert generate(server, **body)["meta_info"]["input_token_logprobs"] == []


def test_ends(server: LiveServer) -> None:
    text = generate(server, text=PROMPT, sampling_params=GREEDY)["text"]
    stop = text[4:7]
    stopped = generate(server, text=PROMPT, sampling_params={**GREEDY, "stop": [stop]})
    assert stopped["text"] == text[: text.index(stop)]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    shown = generate(server, text=PROMPT, sampling_params={**GREEDY, "stop": [stop], "no_stop_trim": True})
    assert shown["text"] == text[: text.index(stop) + len(stop)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": "a", "sampling_params": {"max_new_tokens": "x"}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": ""}, "text"),
        ({"text": "a " * 9000}, "text"),
        ({"input_ids": [99999]}, "input_ids"),
        ({"text": "a", "sampling_params": {"stream": True}}, "sampling_params.stream"),
        ({"text": "a", "sampling_params": 3}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "sampling_params": {"custom_params": {"a": 1}}}, "sampling_params.custom_params"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
    ],
)
def test_errors(server: LiveServer, body: dict[str, Any], param: str) -> None:
    response = server.post("/generate", **body)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param


def test_information(server: LiveServer) -> None:
    for path in ("/model_info", "/get_model_info"):
        info = server.client.get(path).json()
        assert info["is_generation"] is True
        assert info["served_model_name"] == "stories260k"
    for path in ("/server_info", "/get_server_info"):
        info = server.client.get(path).json()
        assert info["context_length"] == server.front.max_model_len
        ends = {"value": "<s> (1), </s> (2)", "source": "config.json, generation_config.json, tokenizer_config.json"}
        assert info["facts"]["end tokens"] == ends
        assert info["max_total_num_tokens"] == server.front.loaded.summary().tokens
    info = server.client.get("/tokenizer_info").json()
    tokens = server.post("/tokenize", prompt=info["eos_token"], add_special_tokens=False).json()["tokens"]
    assert tokens == [server.front.tokenizer.eos_id]  # as lm_eval's remote tokenizer finds the id
    assert info["chat_template"] == CHAT_TEMPLATE


def test_flush_cache_and_health(server: LiveServer) -> None:
    long = PROMPT * 40
    tokens = generate(server, text=long, sampling_params=GREEDY)["meta_info"]["prompt_tokens"]
    cached = generate(server, text=long, sampling_params=GREEDY)["meta_info"]["cached_tokens"]
    assert cached == whole_pages(server, tokens) > 0
    for send in (server.client.post, server.client.get):
        assert send("/flush_cache").status_code == 200
        assert generate(server, text=long, sampling_params=GREEDY)["meta_info"]["cached_tokens"] == 0
    assert server.client.get("/flush_cache", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    before = server.front.loaded.stats()["generated_tokens"]
    assert server.client.get("/health_generate").status_code == 200
    assert server.front.loaded.stats()["generated_tokens"] > before
    assert server.on_loop(lambda: server.front.admitted) == 0
