"""Responses that the server keeps: conversations by id, retrieval, deletion, limits, keys, cancellation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, error_of, live_server, wait_until_idle

from kvanta.server.http.errors import ApiError
from kvanta.server.openai.stored_responses import SECONDS, ResponseStore, named_items, page_of

FEW = {"max_output_tokens": 4, "temperature": 0}
KEYS = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(store_bytes=1 << 20) as running:
        yield running


def create(server: LiveServer, **body: Any) -> dict[str, Any]:
    """A response."""
    response = server.post("/v1/responses", **{**FEW, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_conversation_goes_on_by_its_id(server: LiveServer) -> None:
    first = create(server, input="Lily", instructions="Be brief.")
    assert first["store"] is True
    second = create(server, input="And Tom?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    items = [{"role": "user", "content": "Lily"}, *first["output"], {"role": "user", "content": "And Tom?"}]
    whole = create(server, input=items, store=False)
    assert (whole["output"][0]["content"], whole["store"]) == (second["output"][0]["content"], False)
    assert whole["usage"]["input_tokens"] == second["usage"]["input_tokens"], "instructions are not inherited"
    third = server.post("/v1/responses/input_tokens", input="Go on.", previous_response_id=second["id"]).json()
    assert third["input_tokens"] > second["usage"]["input_tokens"]


def test_references_to_items(server: LiveServer) -> None:
    """As Vercel's AI SDK has them for answers of a server that stores."""
    first = create(server, input="Lily")
    (answer,) = first["output"]
    references = [{"type": "item_reference", "id": answer["id"]}] * 2
    question = {"role": "user", "content": "And Tom?"}
    whole = create(server, input=[{"role": "user", "content": "Lily"}, answer, answer, question], store=False)
    second = create(server, input=[{"role": "user", "content": "Lily"}, *references, question])
    assert second["output"][0]["content"] == whole["output"][0]["content"]
    assert create(server, input="Go on.", previous_response_id=second["id"])["usage"]["input_tokens"]
    for name in ("msg_none", None):
        missing = server.post("/v1/responses", input=[{"type": "item_reference", "id": name}, question])
        assert missing.status_code == 404
        assert error_of(missing)["code"] == "item_not_found"


def test_streams_are_kept(server: LiveServer) -> None:
    with server.client.stream("POST", "/v1/responses", json={**FEW, "input": "Lily", "stream": True}) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    last = events[-1]["response"]
    assert server.client.get(f"/v1/responses/{last['id']}").json() == last


def test_retrieval_items_and_deletion(server: LiveServer) -> None:
    given = [{"role": "user", "content": f"Lily {number}"} for number in range(3)]
    made = create(server, input=given)
    path = f"/v1/responses/{made['id']}"
    assert server.client.get(path).json() == made
    page = server.client.get(f"{path}/input_items", params={"limit": 2, "order": "asc"}).json()
    assert [item["content"] for item in page["data"]] == ["Lily 0", "Lily 1"]
    assert page["has_more"] is True
    rest = server.client.get(f"{path}/input_items", params={"order": "asc", "after": page["last_id"]}).json()
    assert [item["content"] for item in rest["data"]] == ["Lily 2"]
    assert server.client.get(f"{path}/input_items", params={"limit": 0}).status_code == 400
    assert error_of(server.client.post(f"{path}/cancel"))["message"].endswith("is finished")
    assert server.client.delete(path).json() == {"id": made["id"], "object": "response.deleted", "deleted": True}
    for method in ("GET", "DELETE"):
        assert server.client.request(method, path).status_code == 404
    refused = server.post("/v1/responses", input="a", previous_response_id=made["id"])
    assert (refused.status_code, error_of(refused)["code"]) == (400, "previous_response_not_found")


def test_a_running_response_is_cancelled(server: LiveServer) -> None:
    body = {"input": "Lily", "stream": True, "max_output_tokens": 480, "ignore_eos": True}
    with server.client.stream("POST", "/v1/responses", json=body) as stream:
        lines = stream.iter_lines()
        name = next(json.loads(line[6:])["response"]["id"] for line in lines if line.startswith("data: "))
        done = server.client.post(f"/v1/responses/{name}/cancel")
        assert (done.status_code, done.json()["status"]) == (200, "cancelled")
        assert not [line for line in lines if '"response.completed"' in line]
    wait_until_idle(server)
    assert server.client.get(f"/v1/responses/{name}").status_code == 404


def test_a_response_belongs_to_its_key() -> None:
    with live_server(store_bytes=1 << 20, api_keys=["one", "two"]) as server:
        made = server.client.post("/v1/responses", json={**FEW, "input": "a"}, headers=KEYS[0]).json()["id"]
        for headers, status in zip(KEYS, (200, 404), strict=True):
            assert server.client.get(f"/v1/responses/{made}", headers=headers).status_code == status
        body = {**FEW, "input": "b", "previous_response_id": made}
        assert server.client.post("/v1/responses", json=body, headers=KEYS[1]).status_code == 400
        assert server.client.get(f"/v1/responses/{made}").status_code == 401


def test_a_server_that_keeps_nothing() -> None:
    with live_server() as server:
        made = server.post("/v1/responses", input="a", store=True, **FEW)
        assert (made.headers["x-kvanta-ignored"], made.json()["store"]) == ("store", False)
        assert server.client.get(f"/v1/responses/{made.json()['id']}").status_code == 404
        refused = server.post("/v1/responses", input="a", previous_response_id="resp_1")
        assert "--store-responses" in error_of(refused)["message"]


def answer(name: str, text: str = "") -> dict[str, Any]:
    """A response with one item."""
    return {"id": name, "output": [{"type": "message", "content": text}]}


def test_the_store_has_a_size_and_a_time() -> None:
    now = [0.0]
    store = ResponseStore(1200, lambda: now[0])
    for name in ("a", "b", "c"):
        assert store.put(answer(name, "x" * 200), named_items("y"), "", "")
    assert 900 < store.size <= 1200
    store.get("a", "")  # used, so that b goes first
    store.put(answer("d", "x" * 200), named_items("y"), "", "")
    with pytest.raises(ApiError):
        store.get("b", "")
    assert not store.put(answer("e", "x" * 2000), [], "", "")
    assert json.loads(store.get("a", "").response)["id"] == "a"
    now[0] = SECONDS
    with pytest.raises(ApiError):
        store.get("a", "")
    store.put(answer("f"), [], "", "")
    assert 0 < store.size < 200, "what is too old has gone"


def test_a_circle_of_responses_ends() -> None:
    store = ResponseStore(10_000)
    store.put(answer("a", "1"), named_items("x"), "b", "")
    store.put(answer("b", "2"), named_items("y"), "a", "")
    assert len(store.history("a", "")) == 4


def test_pages_of_nothing() -> None:
    assert page_of([], 20, "desc", None) == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    with pytest.raises(ApiError, match="order"):
        page_of([], 20, "up", None)
    with pytest.raises(ApiError, match="after"):
        page_of([], 20, "asc", "x")
