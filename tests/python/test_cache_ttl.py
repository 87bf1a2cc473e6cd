"""cache_ttl: a request's prefix is kept for a time, within the operator's bounds."""

from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, error_of, live_server

from kvanta import LLM, SamplingParams

WORDS = "Once upon a time there was a little girl who had a red ball and a big dog. " * 4
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": WORDS}]}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(options={"max_cache_ttl": 60, "block_size": 16}) as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


def pinned(server: LiveServer) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("kvanta:kv_cache_pinned_bytes")]
    return float(line.split()[-1])


def test_a_prefix_is_pinned_up_to_the_maximum() -> None:
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "block_size": 16, "max_model_len": 256, "threads": 1}
    prompt = [{"prompt_token_ids": list(range(3, 103))}]
    params = SamplingParams(max_tokens=1, cache_ttl=3600)
    with pytest.raises(ValueError, match=r"cache_ttl = 3600: .*max_cache_ttl"):
        LLM("stories260k", **options).generate(prompt, params)
    llm = LLM("stories260k", max_cache_ttl=1, **options)
    llm.generate(prompt, SamplingParams(max_tokens=1))
    assert llm.stats()["prefix_pinned_bytes"] == 0
    llm.generate(prompt, params)
    assert llm.stats()["prefix_pinned_bytes"] > 0
    with pytest.raises(ValueError, match="cache_ttl"):
        SamplingParams(cache_ttl=-1)
    with pytest.raises(ValueError, match="max_cache_ttl = 90000"):
        LLM("stories260k", max_cache_ttl=90000, **options)


def test_completions_and_chats_have_it(server: LiveServer, plain: LiveServer) -> None:
    assert pinned(server) == 0
    assert server.post("/v1/completions", prompt=WORDS, max_tokens=1, cache_ttl=10).status_code == 200
    once = pinned(server)
    assert once > 0
    chat: list[dict[str, Any]] = [{"role": "user", "content": WORDS}]
    assert server.post("/v1/chat/completions", messages=chat, max_tokens=1, cache_ttl=0.5).status_code == 200
    assert pinned(server) > once
    for wrong in (-1, "long", [5]):
        response = server.post("/v1/completions", prompt=WORDS, max_tokens=1, cache_ttl=wrong)
        assert (response.status_code, error_of(response)["param"]) == (400, "cache_ttl"), wrong
    refused = plain.post("/v1/completions", prompt=WORDS, max_tokens=1, cache_ttl=10)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "cache_ttl")


@pytest.mark.parametrize(
    ("control", "where"),
    [
        ({"type": "ephemeral"}, "message"),
        ({"type": "ephemeral", "ttl": "1h"}, "system"),
        ({"type": "ephemeral", "ttl": "5m"}, "request"),
    ],
)
def test_cache_control_of_messages_is_a_ttl(control: dict[str, str], where: str, plain: LiveServer) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 1}
    if where == "message":
        body["messages"] = [{"role": "user", "content": [{"type": "text", "text": WORDS, "cache_control": control}]}]
    elif where == "system":
        body["system"] = [{"type": "text", "text": "Be kind.", "cache_control": control}]
    else:
        body["cache_control"] = control
    with live_server(options={"max_cache_ttl": 60, "block_size": 16}) as server:
        assert server.post("/v1/messages", messages=MESSAGES, max_tokens=1).status_code == 200
        assert pinned(server) == 0
        assert server.post("/v1/messages", **body).status_code == 200
        assert pinned(server) > 0
    assert plain.post("/v1/messages", **body).status_code == 200  # clients send it to any server
    assert pinned(plain) == 0


@pytest.mark.parametrize("control", [{"type": "eternal"}, {"type": "ephemeral", "ttl": "2h"}, {"ttl": []}, 5])
def test_other_cache_controls_are_refused(server: LiveServer, control: Any) -> None:
    response = server.post("/v1/messages", messages=MESSAGES, max_tokens=1, cache_control=control)
    assert response.status_code == 400
    assert "cache_control" in response.json()["error"]["message"]
