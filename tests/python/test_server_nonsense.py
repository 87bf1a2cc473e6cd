"""Bodies that are nearly right: any of them gets an answer or a proper error."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, error_of, live_server

CHAT = [{"role": "user", "content": "Lily"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(tool_call_parser="hermes") as running:
        yield running


FIELDS = [
    *("prompt", "messages", "model", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n"),
    *("stop", "stop_token_ids", "logit_bias", "logprobs", "top_logprobs", "echo", "stream", "stream_options", "user"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos", "prompt_logprobs", "cache_salt"),
    *(
        "priority",
        "return_token_ids",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "add_generation_prompt",
        "continue_final_message",
    ),
    *(
        "best_of",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "chat_template_kwargs",
        "tokens",
        "max_completion_tokens",
        "x",
    ),
]


def nonsense(generator: random.Random, depth: int = 0) -> Any:
    """Any JSON value, with a liking for those that are nearly right."""
    simple: list[Any] = [
        *(None, True, False, 0, 1, -1, 5, 2**31, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e308, 1e-320, float("nan")),
        *(float("inf"), "", "a", "Once upon a time", "\ud800", "\x00", "é€😀", "{{ 1 }}", "a" * 2000, "1", "user"),
    ]
    kind = generator.randrange(8 if depth < 3 else 5)
    if kind < 5:
        return generator.choice(simple)
    if kind == 5:
        return [nonsense(generator, depth + 1) for _ in range(generator.randrange(4))]
    if kind == 6:
        return [generator.randrange(600) for _ in range(generator.randrange(9))]
    keys = ["role", "content", "type", "text", "function", "arguments", "include_usage", "5", *FIELDS[:3]]
    return {generator.choice(keys): nonsense(generator, depth + 1) for _ in range(generator.randrange(4))}


@pytest.mark.parametrize("seed", range(3))
def test_nonsense_gives_no_server_error(server: LiveServer, seed: int) -> None:
    generator = random.Random(seed)
    right: dict[str, Any] = {"prompt": "Lily", "messages": CHAT, "max_tokens": 2, "tokens": [1, 2]}
    for round_ in range(150):
        body = dict(right)
        for _ in range(generator.randrange(1, 4)):
            body[generator.choice(FIELDS)] = nonsense(generator)
        path = generator.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
        data = json.dumps(body).encode()
        if generator.random() < 0.1:  # cut or damaged
            at = generator.randrange(len(data))
            data = data[:at] + bytes([generator.randrange(256)]) + data[at + generator.randrange(3) :]
        response = server.client.post(path, content=data, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400, 404), (seed, round_, path, data, response.text)
        if response.status_code != 200:
            error_of(response)
        elif not response.headers["content-type"].startswith("text/event-stream"):
            json.loads(response.content.decode())
    assert server.client.get("/health").status_code == 200
