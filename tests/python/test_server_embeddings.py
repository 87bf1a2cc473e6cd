"""/v1/embeddings, /rerank and /score: what LLM computes, vLLM's and Jina's shapes, limits, clients that leave."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from live_server import LiveServer, error_of, leave_when_computing, live_server, wait_until_idle
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from kvanta import LLM, PoolingParams
from kvanta.server.openai import pooling_api
from kvanta.server.requests.pooling_protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from kvanta.server.requests.request_fields import IGNORED, POOLING_REFUSED, REFUSED

TEXTS = ["Once upon a time", "Lily had a cat.", "The dog was big and red."]
QUERY = "Lily had a dog."
# Fields of the requests of vLLM 0.33, Jina and Cohere.
KNOWN = {
    EmbeddingRequest: """
        add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs continue_final_message
        dimensions embed_dtype embedding_type embedding_types encoding_format endianness input input_type late_chunking
        media_io_kwargs messages mm_processor_kwargs model normalize padding priority request_id task
        truncate truncate_prompt_tokens truncation truncation_side use_activation user""",
    RerankRequest: """
        activation cache_salt documents instruction max_chunks_per_doc max_tokens_per_doc mm_processor_kwargs model
        overlap_tokens padding priority query rank_fields request_id return_documents return_embeddings softmax top_n
        truncate_prompt_tokens truncation truncation_side use_activation user""",
    ScoreRequest: """
        activation cache_salt data_1 data_2 documents instruction items mm_processor_kwargs model padding priority
        queries request_id softmax text_1 text_2 truncate_prompt_tokens truncation_side use_activation user""",
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(TEXTS)]


def answer(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    response = server.post(path, **body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def embeddings(server: LiveServer, **body: Any) -> list[Any]:
    data = answer(server, "/v1/embeddings", **body)["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [entry["embedding"] for entry in data]


def test_every_form_of_input(server: LiveServer, llm: LLM, expected: list[list[float]]) -> None:
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    assert embeddings(server, input=TEXTS) == expected
    assert embeddings(server, input=ids) == expected
    assert embeddings(server, input=TEXTS[0]) == embeddings(server, input=ids[0]) == expected[:1]
    whole = answer(server, "/v1/embeddings", input=TEXTS, model="tiny", user="someone")
    tokens = sum(map(len, ids))
    assert whole["usage"]["prompt_tokens"] == whole["usage"]["total_tokens"] == tokens
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["object"] == "list"
    assert whole["model"] == "stories260k"


def test_parameters(server: LiveServer, llm: LLM) -> None:
    mean = llm.embed(TEXTS[0], pooling_params=PoolingParams(pooling_type="mean", normalize=False, dimensions=5))
    fields = {"pooling_type": "MEAN", "normalize": False, "dimensions": 5}
    assert embeddings(server, input=TEXTS[0], **fields) == [mean[0].outputs.embedding]
    cut = llm.embed({"prompt_token_ids": llm.tokenizer.encode(TEXTS[0])[:2]})[0].outputs.embedding
    assert embeddings(server, input=TEXTS[0], truncate_prompt_tokens=2, truncation_side="right") == [cut]
    bare = llm.embed({"prompt_token_ids": llm.tokenizer.encode(TEXTS[0], add_special_tokens=False)})
    assert embeddings(server, input=TEXTS[0], add_special_tokens=False) == [bare[0].outputs.embedding]
    long = "Lily had a cat. " * 400
    limit = server.front.max_model_len
    whole = answer(server, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert whole["usage"]["prompt_tokens"] == limit


def test_openai_client(server: LiveServer, expected: list[list[float]]) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        by_default = client.embeddings.create(model="tiny", input=TEXTS)  # the client requests base64
        as_floats = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float", dimensions=8)
        as_base64 = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="base64")
    assert [entry.embedding for entry in by_default.data] == expected
    assert [len(entry.embedding) for entry in as_floats.data] == [8] * 3
    raw: Any = as_base64.data[0].embedding  # the client does not decode it if the caller requested it
    assert decoded(raw).tolist() == expected[0]
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens > 0


def decoded(text: str) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(text), dtype="<f4")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(server: LiveServer, llm: LLM, path: str) -> None:
    scores = [pair.outputs.score for pair in llm.score(QUERY, TEXTS)]
    order = sorted(range(3), key=lambda index: -scores[index])
    assert order != [0, 1, 2]
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    whole = answer(server, path, query=QUERY, documents=documents)
    assert whole["results"] == [
        {"index": index, "relevance_score": pytest.approx(scores[index], abs=1e-6), "document": {"text": TEXTS[index]}}
        for index in order
    ]
    assert whole["usage"]["total_tokens"] == sum(len(llm.tokenizer.encode(text)) for text in [QUERY, *TEXTS])
    first = answer(server, path, query={"text": QUERY}, documents=documents, top_n=1, return_documents=False)
    assert first["results"] == [{"index": order[0], "relevance_score": whole["results"][0]["relevance_score"]}]
    assert len(answer(server, path, query=QUERY, documents=documents, top_n=0)["results"]) == 3


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score(server: LiveServer, llm: LLM, path: str) -> None:
    scores = [pytest.approx(pair.outputs.score, abs=1e-6) for pair in llm.score(QUERY, TEXTS)]
    one_to_many = answer(server, path, text_1=QUERY, text_2=TEXTS)
    assert [entry["score"] for entry in one_to_many["data"]] == scores
    assert [entry["index"] for entry in one_to_many["data"]] == [0, 1, 2]
    pairs = answer(server, path, text_1=[QUERY] * 2, text_2=TEXTS[:2])
    assert pairs["data"] == one_to_many["data"][:2]
    for first, second in (("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
        assert answer(server, path, **{first: QUERY, second: TEXTS[0]})["data"] == one_to_many["data"][:1]


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {}, "input", "Field required"),
    ("/v1/embeddings", {"input": []}, "input", "input is an empty list"),
    ("/v1/embeddings", {"input": None}, "input", "got null"),
    ("/v1/embeddings", {"input": ""}, "input", "the prompt is empty"),
    ("/v1/embeddings", {"input": ["a", 5]}, "input", "input must be a text, texts, token ids"),
    ("/v1/embeddings", {"input": {"text": "a"}}, "input", "input must be a text, texts, token ids"),
    ("/v1/embeddings", {"input": [5, True]}, "input", "token ids must be whole numbers"),
    ("/v1/embeddings", {"input": [5, 512]}, "input", "token id 512 at position 1 is not in 0..511"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "input must have at most 2048 texts, got 2049"),
    ("/v1/embeddings", {"input": [5] * 513}, "input", "the prompt has 513 tokens, max_model_len = 512 allows 512"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "must be float or base64"),
    ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions", "hidden size, 64"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "must be a whole number in 1.."),
    ("/v1/embeddings", {"input": "a", "pooling_type": "cls"}, "pooling_type", "must be one of mean, last"),
    ("/v1/embeddings", {"input": "a", "priority": 3}, "priority", "needs a server with --scheduling-policy"),
    ("/v1/embeddings", {"input": "a", "endianness": "big"}, "endianness", "is not supported, got 'big'"),
    ("/v1/embeddings", {"input": "a", "messages": [{}]}, "messages", "is not supported"),
    ("/v1/embeddings", {"input": "a", "lora_path": "x"}, "lora_path", "is not supported"),
    ("/rerank", {"query": "a"}, "documents", "Field required"),
    ("/rerank", {"query": ["a", "b"], "documents": ["a"]}, "query", "query must be one text, got 2"),
    ("/rerank", {"query": "a", "documents": []}, "documents", "documents is an empty list"),
    ("/rerank", {"query": "a", "documents": ["a", ""]}, "documents", "must be texts that are not empty"),
    ("/rerank", {"query": "a", "documents": [{"image": "a"}]}, "documents", "must be texts that are not empty"),
    ("/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents", "at most 2048 texts"),
    ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "must be a whole number in 0.."),
    ("/rerank", {"query": "a", "documents": ["b " * 5000]}, "documents", "the prompt has 10000 characters"),
    ("/rerank", {"query": "b " * 5000, "documents": ["a"]}, "query", "the prompt has 10000 characters"),
    ("/score", {"queries": "a", "items": ["a", "b " * 5000]}, "items", "the prompt has 10000 characters"),
    ("/rerank", {"query": "a", "documents": ["a"], "softmax": True}, "softmax", "is not supported"),
    ("/score", {"text_1": "a"}, "text_2", "give one of text_2, data_2, documents, items, got nothing"),
    ("/score", {"text_1": "a", "data_1": "a", "text_2": "b"}, "data_1", "got text_1 and data_1"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "one text or as many as the other side, 1, got 2"),
    ("/score", {"text_1": 5, "text_2": "b"}, "text_1", "must be texts that are not empty"),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), WRONG)
def test_wrong_requests(server: LiveServer, path: str, body: dict[str, Any], param: str, message: str) -> None:
    response = server.post(path, **body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert message in error["message"]
    assert error["param"] == param
    assert len(error["message"]) < 400


def test_other_errors(server: LiveServer) -> None:
    assert error_of(server.post("/score", model="other", text_1="a", text_2="b"))["code"] == "model_not_found"
    too_long = error_of(server.post("/v1/embeddings", input=[5] * 600))
    assert too_long["code"] == "context_length_exceeded"


@pytest.mark.parametrize("kind", KNOWN)
def test_every_field_is_known(kind: Any) -> None:
    tables = [{*kind.model_fields}, {*POOLING_REFUSED}, {*IGNORED}]
    assert {*KNOWN[kind].split()} - set().union(*tables) == set()
    others = kind.model_fields.keys() | REFUSED.keys() - {"chat_template"} | IGNORED.keys()
    assert not POOLING_REFUSED.keys() & others


@pytest.mark.parametrize("name", POOLING_REFUSED)
def test_what_cannot_be_honoured_is_refused(server: LiveServer, name: str) -> None:
    error = error_of(server.post("/v1/embeddings", input="a", **{name: [17]}))
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is not supported, got [17]: ")
    for neutral in (None, *POOLING_REFUSED[name].neutral):
        assert server.post("/v1/embeddings", input="a", **{name: neutral}).status_code == 200


def test_more_texts_than_the_engine_runs_at_once(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In portions, which take no more of the queue; the answer is written by another thread."""
    admitted: list[int] = []
    admit = server.front.admit

    def counted(count: int) -> Callable[[], None]:
        admitted.append(count)
        return admit(count)

    monkeypatch.setattr(server.front, "admit", counted)
    loop_thread = server.on_loop(threading.get_ident)
    on_loop: list[bool] = []
    write = vars(pooling_api)["_base64"]

    def written(output: Any) -> str:
        on_loop.append(threading.get_ident() == loop_thread)
        return str(write(output))

    monkeypatch.setattr(pooling_api, "_base64", written)
    texts = [f"{index} {TEXTS[index % 3]}" for index in range(100)]
    found = embeddings(server, input=texts, encoding_format="base64")
    assert admitted == [8]
    assert on_loop == [False] * 100
    for index in (0, 7, 8, 99):
        assert decoded(found[index]).tolist() == embeddings(server, input=texts[index])[0]
    wait_until_idle(server)


def test_a_client_that_leaves(server: LiveServer) -> None:
    body = {"input": ["Lily had a cat. " * 60] * 2000, "pooling_type": "mean"}
    assert leave_when_computing(server, "/v1/embeddings", "prompt_tokens", **body) < 2000 * 240
    assert server.on_loop(lambda: server.front.metrics.responses["/v1/embeddings", "499"]) == 1


def test_metrics() -> None:
    with live_server() as server:
        answer(server, "/v1/embeddings", input=TEXTS)
        assert error_of(server.post("/score"))
        text = server.client.get("/metrics").text
    values = {
        (
            sample.name,
            *(sample.labels[key] for key in ("finished_reason", "endpoint", "status") if key in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["kvanta:request_success_total", "stop"] == 3
    assert values[("kvanta:request_prompt_tokens_count",)] == values[("kvanta:e2e_request_latency_seconds_count",)] == 3
    assert values[("kvanta:request_queue_time_seconds_count",)] == 3
    assert values[("kvanta:request_generation_tokens_count",)] == values[("kvanta:generation_tokens_total",)] == 0
    assert values["kvanta:http_responses_total", "/v1/embeddings", "200"] == 1
    assert values["kvanta:http_responses_total", "/score", "400"] == 1


def test_full_queue_and_time_limit() -> None:
    with live_server(options={"max_num_seqs": 1, "max_queued_requests": 1}) as server:
        give_back = server.on_loop(lambda: server.front.admit(2))
        response = server.post("/v1/embeddings", input=TEXTS)
        assert response.status_code == 429
        assert int(response.headers["Retry-After"]) >= 1
        server.on_loop(give_back)
        assert len(embeddings(server, input=TEXTS)) == 3
        server.front._time_limit = 1e-9
        expired: httpx2.Response = server.post("/v1/embeddings", input=["Lily had a cat. " * 60] * 9)
        assert expired.status_code == 504
        assert error_of(expired)["code"] == "request_timeout"
        wait_until_idle(server)
