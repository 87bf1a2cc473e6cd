"""/openapi.json describes the answers that the server gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, live_server

from kvanta.server.http.errors import LLAMA_PATHS

CHAT = [{"role": "user", "content": "Lily"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(api_keys=["key"]) as running:
        running.client.headers["Authorization"] = "Bearer key"
        yield running


def fits(value: Any, schema: dict[str, Any], where: str = "") -> None:
    """Checks types and names: nothing required is missing, and objects with properties have no others."""
    if "anyOf" in schema:
        if value is not None:
            fits(value, schema["anyOf"][0], where)
        return
    if "const" in schema:
        assert value == schema["const"], where
        return
    kinds: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float)}
    kinds |= {"boolean": bool, "null": type(None)}
    named = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    assert any(isinstance(value, kinds[name]) for name in named), (where, value)
    if isinstance(value, dict) and "properties" in schema:
        assert set(schema["required"]) <= value.keys() <= schema["properties"].keys(), (where, value)
        for name, each in value.items():
            fits(each, schema["properties"][name], f"{where}.{name}")
    for each in value if isinstance(value, list) else ():
        fits(each, schema["items"], where + "[]")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2, "logprobs": 1}),
        ("POST", "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "stop": "e"}),
        ("POST", "/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}),
        ("POST", "/v1/responses", {"input": "a", "max_output_tokens": 2}),
        ("POST", "/v1/messages", {"messages": CHAT, "max_tokens": 2}),
        ("POST", "/v1/messages/count_tokens", {"messages": CHAT}),
        ("POST", "/v1/embeddings", {"input": "a"}),
        ("POST", "/rerank", {"query": "a", "documents": ["a", "b"]}),
        ("POST", "/v2/rerank", {"query": "a", "documents": ["a", "b"], "return_documents": False}),
        ("POST", "/score", {"text_1": "a", "text_2": "b"}),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/tiny", None),
        ("POST", "/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("POST", "/detokenize", {"tokens": [1]}),
        ("GET", "/version", None),
        ("POST", "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}),
        ("GET", "/model_info", None),
        ("GET", "/server_info", None),
        ("GET", "/tokenizer_info", None),
    ],
)
def test_answers_are_as_described(server: LiveServer, method: str, path: str, body: Any) -> None:
    document = server.client.get("/openapi.json").json()
    operation = document["paths"][path.replace("tiny", "{name}")][method.lower()]
    response = server.client.request(method, path, json=body)
    assert response.status_code == 200, response.text
    fits(response.json(), operation["responses"]["200"]["content"]["application/json"]["schema"])


def test_errors_and_keys_are_described(server: LiveServer) -> None:
    document = server.client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            assert "422" not in responses
            keyed = server.client.request(method, path, headers={"Authorization": ""}).status_code == 401
            assert bool(operation["security"]) == ("401" in responses) == keyed, path
            if "requestBody" in operation:
                wrong = server.client.request(method, path, content=b"{", headers={"Content-Type": "application/json"})
                assert str(wrong.status_code) in responses
                described = responses[str(wrong.status_code)]["content"]["application/json"]["schema"]["$ref"]
                assert described.endswith("/AnthropicError") == path.startswith("/v1/messages")
                assert described.endswith("/LlamaError") == (path in LLAMA_PATHS)
                assert described.endswith("/OllamaError") == path.startswith("/api/")
                fits(wrong.json(), schemas[described.rpartition("/")[2]])
    assert {"429", "503", "504"} <= document["paths"]["/v1/completions"]["post"]["responses"].keys()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1}),
        ("/completion", {"prompt": "a", "n_predict": 1}),
        ("/api/chat", {"model": "tiny", "messages": CHAT, "options": {"num_predict": 1}}),
        ("/api/generate", {"model": "tiny", "prompt": "a", "options": {"num_predict": 1}}),
        ("/api/pull", {"model": "tiny"}),
    ],
)
def test_kinds_of_answers_are_described(server: LiveServer, path: str, body: dict[str, Any], stream: bool) -> None:
    described = server.client.get("/openapi.json").json()["paths"][path]["post"]["responses"]["200"]["content"]
    answer = server.post(path, **body, stream=stream)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].partition(";")[0] in described


def references(value: Any) -> Iterator[str]:
    """All that a document refers to."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from references(each)


def test_references_lead_somewhere(server: LiveServer) -> None:
    document = server.client.get("/openapi.json").json()
    found = set(references(document))
    assert "#/components/schemas/Error" in found
    for reference in found:
        place = document
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]
