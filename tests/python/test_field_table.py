"""Fields of others' requests: each is honoured, accepted with a reason or refused, and docs/fields.md says so."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from field_lists import SOURCES, class_fields, read_wheel
from field_table import DISTRIBUTIONS, DOCUMENT, ENDPOINTS, fate, fates, render
from live_server import CHAT_TEMPLATE, LiveServer, live_server

from kvanta import InputError, SamplingParams, StructuredOutputsParams
from kvanta.server.requests.request_fields import IGNORED, READ, REFUSED

CHAT = [{"role": "user", "content": "Hi"}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "Once"}]
BODIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}),
    "completions": ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    "responses": ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    "messages": ("/v1/messages", {"messages": CHAT, "max_tokens": 2}),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": CHAT}),
    "embeddings": ("/v1/embeddings", {"input": "a"}),
    "rerank": ("/rerank", {"query": "a", "documents": ["b"]}),
    "score": ("/score", {"text_1": "a", "text_2": ["b"]}),
    "generate": ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}),
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "walk", "parameters": SCHEMA}
# Values of honoured fields, where the type does not give one; None: the field is not sent alone.
VALUES: Mapping[str, Any] = {
    **dict.fromkeys(["max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"], 3),
    **dict.fromkeys(["min_tokens", "min_new_tokens", "n", "seed", "sampling_seed", "top_k", "stream_interval"], 1),
    **dict.fromkeys(["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"], 0.5),
    **dict.fromkeys(["prompt_logprobs", "priority", "thinking_token_budget", "max_thinking_tokens"], 1),
    **dict.fromkeys(["stream", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "echo"], True),
    **dict.fromkeys(["no_stop_trim", "add_special_tokens", "return_token_ids", "parallel_tool_calls"], True),
    **dict.fromkeys(["return_tokens_as_token_ids", "include_reasoning", "return_logprob"], True),
    **dict.fromkeys(["return_text_in_logprobs", "detokenize", "flat_logprobs", "skip_reading_prefix_cache"], True),
    **dict.fromkeys(["stop", "stop_regex", "user", "cache_salt", "extra_key", "instructions", "system"], "zzz"),
    "previous_response_id": None,  # a server that stores responses honours it
    "suffix": "",  # this model has no tokens for it
    "store": True,
    **dict.fromkeys(["prompt_cache_key", "safety_identifier", "service_tier", "text", "prompt", "input"], "zzz"),
    **dict.fromkeys(["regex", "bad_words"], "z+"),
    **dict.fromkeys(["text_1", "text_2", "query", "documents"], "zzz"),
    **dict.fromkeys(["return_documents", "use_activation"], True),
    "add_generation_prompt": True,
    "dimensions": 8,
    "encoding_format": "base64",
    "top_n": 1,
    "allowed_token_ids": [300, 301],
    "cache_control": {"type": "ephemeral"},
    "chat_template_kwargs": {"enable_thinking": False},
    "ebnf": 'root ::= "a"',
    "include": ["message.output_text.logprobs"],
    "json_schema": '{"type": "object"}',
    "logit_bias": {"300": 1},
    "logprobs": True,
    "messages": CHAT,
    "metadata": {"a": "b"},
    "model": "tiny",
    "output_config": {"effort": "high"},
    "reasoning": {"effort": "high"},
    "reasoning_effort": "high",
    "repetition_detection": {"max_pattern_size": 2, "min_count": 3},
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"},
    "sampling_params": {"max_new_tokens": 1},
    "stop_sequences": ["zzz"],
    "stop_token_ids": [300],
    "structured_outputs": {"regex": "z+"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tool_choice": "none",
    "tools": [{"type": "function", "function": FUNCTION}],
    "truncate_prompt_tokens": 1,
    "truncation_side": "right",
}
# Fields that need others, or have another form at an endpoint: what is sent.
TOGETHER: Mapping[tuple[str, str], dict[str, Any]] = {
    ("chat", "continue_final_message"): {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "messages": ANSWERED,
    },
    ("chat", "logprob_token_ids"): {"logprob_token_ids": [5], "logprobs": True},
    ("chat", "top_logprobs"): {"top_logprobs": 2, "logprobs": True},
    ("chat", "stream_options"): {"stream_options": {"include_usage": True}, "stream": True},
    ("completions", "input_ids"): {"input_ids": [300], "prompt": None},
    ("completions", "logprob_token_ids"): {"logprob_token_ids": [5], "logprobs": 1},
    ("completions", "logprobs"): {"logprobs": 1},
    ("completions", "stream_options"): {"stream_options": {"include_usage": True}, "stream": True},
    ("responses", "stream_options"): {"stream_options": {"include_obfuscation": False}, "stream": True},
    ("responses", "text"): {"text": {"format": {"type": "text"}}},
    ("responses", "tools"): {"tools": [{"type": "function", **FUNCTION}]},
    ("responses", "top_logprobs"): {"top_logprobs": 1, "include": ["message.output_text.logprobs"]},
    ("embeddings", "input"): {"input": "zzz"},
    ("score", "data_1"): {"data_1": "a", "text_1": None},
    ("score", "data_2"): {"data_2": "b", "text_2": None},
    ("score", "documents"): {"documents": "b", "text_2": None},
    ("score", "items"): {"items": "b", "text_2": None},
    ("score", "queries"): {"queries": "a", "text_1": None},
    ("generate", "input_ids"): {"input_ids": [300], "text": None},
    ("generate", "logprob_start_len"): {"logprob_start_len": 0, "return_logprob": True},
    ("generate", "token_ids_logprob"): {"token_ids_logprob": [5], "return_logprob": True},
    ("generate", "top_logprobs_num"): {"top_logprobs_num": 2, "return_logprob": True},
    ("SamplingParams", "logit_bias"): {"logit_bias": {300: 1}},
    ("SamplingParams", "logprob_token_ids"): {"logprob_token_ids": [5]},
    ("SamplingParams", "logprobs"): {"logprobs": 1},
    ("SamplingParams", "structured_outputs"): {"structured_outputs": StructuredOutputsParams(regex="z+")},
    **{
        (endpoint, name): {name: value}
        for endpoint in ("messages", "count_tokens")
        for name, value in (
            ("tools", [{"name": "walk", "input_schema": SCHEMA}]),
            ("tool_choice", {"type": "none"}),
        )
    },
}
TABLE = fates()
FIELDS = {
    endpoint: {name: each for (_, other), found in TABLE.items() if other == endpoint for name, each in found.items()}
    for endpoint in ENDPOINTS
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(priorities=True, reasoning_parser="deepseek_r1") as running:
        running.front.tokenizer.use_chat_template(CHAT_TEMPLATE + "{{ '' if reasoning_effort or enable_thinking }}")
        yield running


def send(server: LiveServer, endpoint: str, given: dict[str, Any]) -> Any:
    """The answer to the smallest body with these fields."""
    if endpoint == "sampling_params":
        return server.post("/generate", text="a", sampling_params={"max_new_tokens": 2, **given})
    path, body = BODIES[endpoint]
    return server.post(path, **{**body, **given})


def of_kind(endpoint: str, kind: str) -> list[str]:
    return [name for name, found in FIELDS[endpoint].items() if found.kind == kind]


def test_no_field_is_unknown() -> None:
    for key, found in TABLE.items():
        assert [name for name, each in found.items() if each.kind == "unknown"] == [], key
        assert [name for name, each in found.items() if each.kind != "honoured" and not each.reason] == [], key
    assert len(TABLE["vllm", "SamplingParams"]) == 39
    assert DOCUMENT.read_text(encoding="utf-8") == render(TABLE), "run tools/field_table.py"
    assert not (REFUSED.keys() & IGNORED.keys()) | (READ & (REFUSED.keys() | IGNORED.keys()))


@pytest.mark.parametrize("endpoint", [*BODIES, "sampling_params"])
def test_refused_fields(server: LiveServer, endpoint: str) -> None:
    tables = [name for name in ENDPOINTS[endpoint].refused if fate(endpoint, name).kind == "refused"]
    for name in {*of_kind(endpoint, "refused"), *tables}:
        response = send(server, endpoint, {name: [17]})
        assert response.status_code == 400, (name, response.text)
        assert f"{name} is not supported, got [17]: " in response.json()["error"]["message"]
        described = ENDPOINTS[endpoint]
        refused = described.refused.get(name) or ENDPOINTS[described.rest or endpoint].refused.get(name)
        for neutral in (None, *(refused.neutral if refused else ())):
            response = send(server, endpoint, {name: neutral})
            assert response.status_code == 200, (name, neutral, response.text)


@pytest.mark.parametrize("endpoint", [*BODIES, "sampling_params"])
def test_accepted_fields(server: LiveServer, endpoint: str) -> None:
    for name in of_kind(endpoint, "accepted"):
        value = True if name == "spaces_between_special_tokens" else [17]
        response = send(server, endpoint, {name: value})
        assert response.status_code == 200, (name, response.text)


@pytest.mark.parametrize("endpoint", [*BODIES, "sampling_params"])
def test_honoured_fields(server: LiveServer, endpoint: str) -> None:
    for name in of_kind(endpoint, "honoured"):
        given = TOGETHER.get((endpoint, name)) or {name: VALUES[name]}
        response = send(server, endpoint, given)
        assert response.status_code == 200, (name, response.text)
        wrong = send(server, endpoint, {**given, name: [{"no such": "value"}]})
        assert wrong.status_code == 400, (name, "is not read")


def make(name: str, value: Any) -> SamplingParams:
    return SamplingParams(**{name: value})


def test_fields_of_sampling_params() -> None:
    for name in of_kind("SamplingParams", "refused"):
        with pytest.raises(InputError, match=rf"^{name} is not supported, got \[17\]: "):
            make(name, [17])
    for name in of_kind("SamplingParams", "honoured"):
        given = TOGETHER.get(("SamplingParams", name), {name: VALUES.get(name)})
        assert all(getattr(SamplingParams(**given), each) is not None for each in given)
        with pytest.raises(InputError, match=name):
            make(name, object())
    for name in of_kind("SamplingParams", "accepted"):
        with pytest.raises(InputError, match=name):
            make(name, object())


@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_lists_are_those_of_the_clients(package: str) -> None:
    spec = find_spec(package)
    if spec is None or DISTRIBUTIONS[package] != f"{package} {version(package)}":
        pytest.skip(f"{DISTRIBUTIONS[package]} is not installed")
    folder = next(iter(spec.submodule_search_locations or ()))
    for endpoint, sources in SOURCES[package].items():
        found = set[str]()
        for path, name in sources:
            found |= class_fields(ast.parse((Path(folder).parent / path).read_text(encoding="utf-8")), name)
        assert found == TABLE[package, endpoint].keys()


def test_lists_are_read_from_sources(tmp_path: Path) -> None:
    text = "class Base:\n    a: int\n    _b: int\nclass {name}(Base, Other):\n    c: str = ''\n    def d(self): ...\n"
    wheel = tmp_path / "openai-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for sources in SOURCES["openai"].values():
            for path, name in sources:
                archive.writestr(path, text.replace("{name}", name))
    assert [*read_wheel(wheel)] == [f"openai {endpoint}: a c" for endpoint in SOURCES["openai"]]
