"""`kvanta bench serve` against a server whose answers the tests choose."""

import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_openai_server import HEAD, SILENCE, STREAM, FakeServer, error, event, usage_of, whole_answer

from kvanta.cli import main

FEW = ["--requests", "4", "--input-len", "20", "--output-len", "5"]


def bench(server: FakeServer, *words: str, capsys: pytest.CaptureFixture[str], status: int = 0) -> dict[str, Any]:
    """The report of a run on it."""
    assert main(["bench", "serve", server.url, *words, "--json", "-"]) == status, capsys.readouterr().err
    return dict(json.loads(capsys.readouterr().out))


def test_lengths_are_exact_with_token_ids(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        report = bench(server, *FEW, capsys=capsys)
    (run,) = report["runs"]
    assert (report["prompts"], report["exact_lengths"], report["model"]) == ("ids", True, "fake")
    assert [len(body["prompt"]) for body in server.bodies] == [20] * 4
    assert all(type(token) is int for body in server.bodies for token in body["prompt"])
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 4
    assert all(body["ignore_eos"] and body["max_tokens"] == 5 for body in server.bodies)
    assert (run["completed"], run["failed"], run["short_answers"]) == (4, 0, 0)
    assert (run["input_tokens"], run["output_tokens"], run["cached_tokens"]) == (80, 20, 12)
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        figures = run[name]
        assert 0 <= figures["p50"] <= figures["p90"] <= figures["p95"] <= figures["p99"] <= figures["max"]
    assert run["e2e_ms"]["max"] <= 1000 * run["duration_s"]


def test_prompts_come_again_in_no_other_run_but_with_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        report = bench(server, *FEW, "--concurrency", "1", "2", capsys=capsys)
        bench(server, *FEW, "--concurrency", "1", "2", capsys=capsys)
    assert [run["concurrency"] for run in report["runs"]] == [1, 2]
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts[:8])) == 8
    assert set(prompts[8:]) == set(prompts[:8])


def test_a_shared_prefix_is_shared(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        bench(server, *FEW, "--shared-prefix-len", "30", capsys=capsys)
    assert {len(body["prompt"]) for body in server.bodies} == {50}
    assert len({tuple(body["prompt"][:30]) for body in server.bodies}) == 1
    assert len({tuple(body["prompt"][30:]) for body in server.bodies}) == 4


def test_concurrency_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        (run,) = bench(server, *FEW, "--requests", "12", "--concurrency", "2", capsys=capsys)["runs"]
    assert server.most_at_once <= 2
    assert run["peak_concurrency"] == 2
    assert run["completed"] == 12


def test_a_server_of_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    async def only_text(body: dict[str, Any]) -> AsyncIterator[bytes]:
        if isinstance(body["prompt"], list):
            yield error(400, "prompt must be a string")
            return
        async for part in whole_answer(body):
            yield part

    with FakeServer(answer=only_text) as server:
        report = bench(server, *FEW, capsys=capsys)
    assert report["prompts"] == "text"
    assert [len(body["prompt"].split()) for body in server.bodies] == [10] * 4  # it takes two tokens for a word
    assert report["runs"][0]["input_tokens"] == 80


def test_a_server_that_refuses_extensions(capsys: pytest.CaptureFixture[str]) -> None:
    async def strict(body: dict[str, Any]) -> AsyncIterator[bytes]:
        if "ignore_eos" in body:
            yield error(422, "unknown field ignore_eos")
            return
        async for part in whole_answer({**body, "max_tokens": body["max_tokens"] - 1}):  # ends by itself
            yield part

    with FakeServer(answer=strict, with_tokenize=False) as server:
        report = bench(server, *FEW, capsys=capsys)
        assert (report["exact_lengths"], report["prompts"]) == (False, "text")
        assert report["runs"][0]["short_answers"] == 4
        assert main(["bench", "serve", server.url, *FEW]) == 0
    assert "4 of 4 answers were shorter" in capsys.readouterr().out


def test_chat(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        report = bench(server, *FEW, "--api", "chat", "--input-len", "25", capsys=capsys)
    assert report["api"] == "chat"
    (run,) = report["runs"]
    assert (run["completed"], run["output_tokens"]) == (4, 20)
    assert run["input_tokens"] == 100  # 10 words of two tokens and the template's 5, each
    assert run["itl_ms"]["max"] >= 0


def test_tokens_are_counted_where_the_server_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    async def uncounted(body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for part in whole_answer({**body, "stream_options": {}}):
            yield part

    with FakeServer(answer=uncounted) as server:
        (run,) = bench(server, *FEW, capsys=capsys)["runs"]
    assert (run["input_tokens"], run["output_tokens"]) == (80, 20)


async def refused(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield error(429, "the queue is full")


async def broken(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + event({"choices": [{"text": "a", "finish_reason": None}]})
    yield event({"error": {"message": "out of memory", "code": 500}})


async def cut_off(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + event({"choices": [{"text": "a", "finish_reason": None}]})


async def cut_off_in_a_body_of_known_length(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9999\r\n\r\n"
    yield event({"choices": [{"text": "a", "finish_reason": None}]})


async def closed_at_once(body: dict[str, Any]) -> AsyncIterator[bytes]:
    if not body:
        yield b""


async def nonsense(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield b"\x00\x01\x02 no HTTP at all\r\n\r\n"


async def not_a_stream(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield HEAD % (200, b"application/json") + json.dumps({"choices": [{"text": "a"}]}).encode()


async def damaged_chunk(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + event('{"choices": [')


async def chunk_of_another_kind(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + event([1, 2])


async def nested_chunk(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + event("[" * 100_000)


async def endless_event(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + b"data: "
    for _ in range(6):
        yield b"x" * (1 << 20)


async def no_token(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield STREAM + event({"choices": [], "usage": usage_of(body, 0)}) + event("[DONE]")


async def odd_fields(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Wrong types in every field: the usable ones are counted."""
    yield STREAM + event({"choices": "none"}) + event({"choices": [3, {"text": 4, "finish_reason": None}], "usage": 5})
    usage = {"completion_tokens": "7", "prompt_tokens": -1, "prompt_tokens_details": [1]}
    yield event({"choices": [{"delta": None, "text": "a", "finish_reason": "stop"}], "usage": usage}) + event("[DONE]")


FAILURES = {
    refused: ("http_429", "the queue is full"),
    broken: ("server_error", "out of memory"),
    cut_off: ("disconnected", "without a finish_reason"),
    cut_off_in_a_body_of_known_length: ("disconnected", "closed"),
    closed_at_once: ("disconnected", "isconnected"),
    nonsense: ("bad_response", ""),
    not_a_stream: ("bad_response", "not an event stream but application/json"),
    damaged_chunk: ("bad_response", "not JSON"),
    chunk_of_another_kind: ("bad_response", "not an object"),
    nested_chunk: ("bad_response", "not JSON"),
    endless_event: ("bad_response", "more than"),
    no_token: ("bad_response", "no token"),
}


def test_failures_are_counted_by_kind_and_the_others_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    count = len(FAILURES) + 3
    with FakeServer(answers=dict(enumerate([odd_fields, *FAILURES]))) as server:
        words = ["--requests", str(count), "--input-len", "8", "--output-len", "3", "--concurrency", "1"]
        (run,) = bench(server, *words, capsys=capsys)["runs"]
    assert (run["completed"], run["failed"]) == (3, len(FAILURES))
    assert run["output_tokens"] == 2 + 3 + 3
    expected: dict[str, int] = {}
    for kind, _ in FAILURES.values():
        expected[kind] = expected.get(kind, 0) + 1
    assert {kind: each["count"] for kind, each in run["errors"].items()} == expected


@pytest.mark.parametrize("answer", FAILURES)
def test_each_failure_says_what_it_is(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(answers={0: answer}) as server:
        done = main(["bench", "serve", server.url, "--requests", "1", "--output-len", "3"])
    shown = capsys.readouterr()
    kind, detail = FAILURES[answer]
    assert done == 1
    assert f"1 x {kind}: " in shown.out
    assert detail in shown.out.split(f"1 x {kind}: ")[1]
    assert shown.err == "kvanta: error: not one request was answered\n"


def test_a_server_that_falls_silent_is_a_timeout(capsys: pytest.CaptureFixture[str]) -> None:
    async def silent(body: dict[str, Any]) -> AsyncIterator[Any]:
        yield STREAM + event({"choices": [{"text": "a", "finish_reason": None}]})
        yield SILENCE

    with FakeServer(answers={1: silent}) as server:  # long enough for the others on a busy machine
        (run,) = bench(server, *FEW, "--timeout", "3", capsys=capsys)["runs"]
    assert (run["completed"], run["failed"]) == (3, 1)
    assert run["errors"]["timeout"]["count"] == 1


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listened on
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["bench", "serve", url, *FEW]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvanta: error: {url}/v1/models: connect: ")


def test_the_key_and_other_fields_are_sent(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        bench(server, *FEW, "--api-key", "secret", "--extra-body", '{"top_k": 3}', capsys=capsys)
    assert all("authorization: bearer secret" in head.lower() for head in server.headers)
    assert all(body["top_k"] == 3 for body in server.bodies)


def test_a_wrong_key_is_said_before_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    async def unauthorized(body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield error(401, "no such key")

    with FakeServer(answer=unauthorized) as server:
        assert main(["bench", "serve", server.url, *FEW]) == 2
    assert "http_401: no such key" in capsys.readouterr().err
    assert not server.bodies


def test_a_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 40 * i, "input_length": 600, "output_length": 8 + 2 * i, "hash_ids": [0, 1 + i]} for i in range(5)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with FakeServer() as server:
        words = ["--trace", str(trace), "--length-scale", "0.5", "--time-scale", "0.1", "--concurrency", "1"]
        report = bench(server, *words, "--max-output-len", "6", capsys=capsys)
    assert report["workload"]["kind"] == "mooncake"
    assert report["runs"][0]["rate"] == pytest.approx(250)
    assert [body["max_tokens"] for body in server.bodies] == [4, 5, 6, 6, 6]
    assert {len(body["prompt"]) for body in server.bodies} == {300}
    assert len({tuple(body["prompt"][:256]) for body in server.bodies}) == 1  # half of a block of 512
    assert len({tuple(body["prompt"][256:]) for body in server.bodies}) == 5


def test_counters_of_the_server_are_differences(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = 'vllm:cache_config_info{cache_dtype="fp8"} 1\nvllm:num_preemptions_total 4\n'
    with FakeServer(metrics=metrics) as server:
        report = bench(server, *FEW, "--goodput", "e2e:600000", capsys=capsys)
    assert (report["engine"], report["cache_dtype"], report["label"]) == ("vllm", "fp8", "fp8")
    assert report["runs"][0]["server"] == {"preemptions": 0}
    models = {"data": [{"id": "fake", "kv_cache_dtype": "int4"}]}
    with FakeServer(models=models, metrics="kvanta:num_preemptions_total 4\n") as server:
        report = bench(server, *FEW, "--goodput", "e2e:600000", capsys=capsys)
    assert (report["engine"], report["cache_dtype"], report["label"]) == ("kvanta", "int4", "int4")
    assert report["runs"][0]["goodput"]["share"] == 1


def test_goodput_by_the_time_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The command measures it before the load, one request after the other, with separate prompts."""
    words = ["--input-len", "100", "--length-spread", "0.5", "--output-len", "50", "--requests", "30"]
    with FakeServer() as server:
        report = bench(server, *words, "--slo", "ttft=1e6x,itl=1e3", "e2e=600", capsys=capsys)
        alone, load = server.bodies[:5], server.bodies[5:]
    assert report["runs"][0]["goodput"]["targets_times_alone"] == {"ttft": 1e6}
    assert report["runs"][0]["goodput"]["targets_ms"] == {"itl": 1e6, "e2e": 600_000.0}
    assert report["runs"][0]["goodput"]["share"] == 1
    lengths = [len(body["prompt"]) for body in alone]
    assert [each["input_tokens"] for each in report["alone"]] == lengths == sorted(set(lengths))
    loaded = [len(body["prompt"]) for body in load]
    assert (lengths[0], lengths[-1], len(loaded)) == (min(loaded), max(loaded), 30)
    assert {body["max_tokens"] for body in alone} == {33}
    assert not {tuple(body["prompt"][:20]) for body in alone} & {tuple(body["prompt"][:20]) for body in load}
    with FakeServer() as server:
        report = bench(server, *FEW, "--slo", "ttft=600", capsys=capsys)
        assert len(server.bodies) == 4
    assert report["alone"] is None


def test_a_request_alone_that_fails_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    async def full(body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield error(429, "full")

    with FakeServer(answers={0: full}) as server:
        assert main(["bench", "serve", server.url, *FEW, "--slo", "ttft=5x"]) == 1
    assert "a request alone, of 20 tokens: http_429: full" in capsys.readouterr().err


def test_lengths_without_times_are_sent_at_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "lengths.jsonl"
    trace.write_text('{"input_length": 20, "output_length": 4}\n{"input_length": 30, "output_length": 6}\n')
    with FakeServer() as server:
        words = ["--trace", str(trace), "--rate", "500", "--burstiness", "2", "--concurrency", "1"]
        report = bench(server, *words, capsys=capsys)
    assert (report["workload"]["kind"], report["workload"]["burstiness"]) == ("lengths", 2)
    assert report["runs"][0]["rate"] == 500
    assert [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies] == [(20, 4), (30, 6)]


def test_reports_next_to_each_other_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, picture = tmp_path / "first.json", tmp_path / "load.svg"
    words = [*FEW, "--rate", "200", "400"]
    with FakeServer() as server:
        assert main(["bench", "serve", server.url, *words, "--label", "one", "--json", str(first)]) == 0
        beside = ["--label", "two", "--beside", str(first), "--plot", str(picture)]
        assert main(["bench", "serve", server.url, *words, *beside]) == 0
    assert "<svg" in picture.read_text()
    table = capsys.readouterr().out
    assert table.count("  one ") == 4
    assert table.count("  two ") == 2
    assert main(["bench", "serve", "--beside", str(first), str(first)]) == 0
    assert capsys.readouterr().out.count("  one ") == 4


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of one."""
    file = str(tmp_path_factory.mktemp("report") / "report.json")
    with FakeServer() as server:
        assert main(["bench", "serve", server.url, *FEW, "--json", file]) == 0
    return file


BAD = {
    "no URL": ([], "URL is missing"),
    "no address": (["localhost"], "'localhost' is no address"),
    "another scheme": (["ftp://x"], "'ftp://x' is no address"),
    "a port beyond all": (["http://x:99999"], "is no address"),
    "rates and concurrencies": (["http://x", "--rate", "1", "2", "--concurrency", "1", "2"], "differ in one"),
    "no rate": (["http://x", "--rate", "0"], "rate must be above 0, got 0"),
    "a seed below 0": (["http://x", "--seed", "-1"], "seed: -1"),
    "no places": (["http://x", "--concurrency", "0"], "concurrency is 0"),
    "an odd target": (["http://x", "--goodput", "speed:1"], "names none of ttft, tpot, e2e"),
    "a target twice": (["http://x", "--goodput", "itl:1", "--slo", "ttft=1,itl=1"], "SLO target itl is given twice"),
    "an odd body": (["http://x", "--extra-body", "[]"], "--extra-body"),
    "an odd key": (["http://x", "--api-key", "a\nb"], "API key"),
    "no time": (["http://x", "--timeout", "0"], "timeout must be above 0, got 0"),
    "a trace's option": (["http://x", "--time-scale", "2"], "--time-scale has a meaning only with --trace"),
    "not a trace's option": (
        ["http://x", "--trace", "t", "--input-len", "2"],
        "--input-len has a meaning only without",
    ),
    "no trace": (["http://x", "--trace", "/no/such"], "cannot read the trace '/no/such'"),
    "no picture": (["http://x", "--plot", "x.bmp"], "x.bmp"),
    "nothing measured": (["--beside", "REPORT", "--json", "-"], "--json writes what was measured"),
    "no report": (["--beside", "/no/such"], "cannot read the report '/no/such'"),
    "ids for a chat": (["http://x", "--api", "chat", "--prompts", "ids"], "a chat takes no token ids"),
}


@pytest.mark.parametrize(("words", "reason"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line(words: list[str], reason: str, report: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *(report if word == "REPORT" else word for word in words)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert reason in line


def test_what_the_server_cannot_do_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(with_tokenize=False) as server:
        for words, reason in (
            (["--prompts", "ids"], "has no /tokenize"),
            (["--model", "other"], "no model 'other'; it has fake"),
            (["--input-len", "4092"], "4092 + 5 tokens, the server's max_model_len is 4096"),
        ):
            assert main(["bench", "serve", server.url, *FEW, *words]) == 2
            assert reason in capsys.readouterr().err
    no_models: list[Any] = [{"data": []}, {"data": "x"}, [], {"data": [{"id": 3}]}]
    for models in no_models:
        with FakeServer(models=models) as server:
            assert main(["bench", "serve", server.url, *FEW]) == 1
            assert "no model in the list" in capsys.readouterr().err
