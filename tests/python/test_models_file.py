"""`kvanta serve --models FILE`: models that are loaded by their requests and unloaded for others."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from live_server import error_of, events
from prometheus_client.parser import text_string_to_metric_families
from serve_command import LONG, serving

from kvanta.cli import main

MODEL = "stories260k"
SMALL = {"threads": 1, "kv-cache-memory-bytes": "8MiB", "max-num-seqs": 2}
ONE, TWO = "12MiB", "20MiB"  # budgets for so many models of 9 MiB


def entry(name: str, path: str = MODEL, options: Mapping[str, Any] = SMALL, **fields: Any) -> dict[str, Any]:
    return {"name": name, "path": path, "options": dict(options), **fields}


@contextmanager
def router(
    folder: Path, *models: dict[str, Any], budget: str = TWO, words: tuple[str, ...] = (), **fields: Any
) -> Iterator[tuple[Any, httpx2.Client]]:
    """The server's process, and a client."""
    file = folder / "models.json"
    file.write_text(json.dumps({"models": models, "memory_budget": budget, **fields}))
    with serving("--models", str(file), "--port", "0", *words) as (process, client):
        yield process, client


def states(client: httpx2.Client) -> dict[str, str]:
    found: dict[str, str] = client.get("/health").json()["models"]
    return found


def metric(client: httpx2.Client, name: str, model: str) -> float:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and sample.labels.get("model_name") == model
    )


def complete(client: httpx2.Client, model: str, **body: Any) -> dict[str, Any]:
    fields = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "model": model, **body}
    response = client.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(2400):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it has not come within two minutes")


def children(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


def resident(pid: int) -> int:
    """Bytes of a process and its children."""
    pages = [int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in (pid, *children(pid))]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def test_a_request_goes_to_the_model_that_it_names(tmp_path: Path) -> None:
    eight_bits = entry("eight-bits", options={**SMALL, "kv_cache_dtype": "int8"})
    with router(tmp_path, entry("plain"), eight_bits, entry("unused")) as (_, client):
        assert client.get("/health").json()["status"] == "ok"
        assert set(states(client).values()) == {"unloaded"}
        listed = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert [*listed] == ["plain", "eight-bits", "unused"]
        assert listed["plain"]["status"] == {"value": "unloaded"}
        assert client.get("/api/tags").json()["models"][0]["name"] == "plain:latest"
        assert client.get("/api/ps").json() == {"models": []}

        texts = [complete(client, name) for name in ("plain", "eight-bits")]
        assert [each["model"] for each in texts] == ["plain", "eight-bits"]
        stream = client.post("/api/generate", json={"model": "plain:latest", "prompt": "Once"})
        assert json.loads(stream.text.splitlines()[-1])["done"] is True
        assert "x-kvanta-ignored" not in stream.headers
        tokens = client.post("/tokenize", json={"model": "eight-bits", "prompt": "Once"})
        assert tokens.json()["count"] == 2
        assert client.get("/props", params={"model": "plain"}).json()["default_generation_settings"]["n_ctx"] == 512

        assert states(client) == {"plain": "loaded", "eight-bits": "loaded", "unused": "unloaded"}
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert [cards[name].get("kv_cache_dtype") for name in cards] == ["fp32", "int8", None]
        assert client.get("/v1/models/plain").json() == cards["plain"]
        claude = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
        assert [each["id"] for each in claude["data"]] == [*cards]
        running = client.get("/api/ps").json()["models"]
        assert [each["name"] for each in running] == ["plain:latest", "eight-bits:latest"]
        assert running[0]["context_length"] == 512
        assert {slot["model"] for slot in client.get("/slots").json()} == {"plain", "eight-bits"}
        assert client.get("/props").json()["role"] == "router"
        for name in ("plain", "eight-bits"):
            assert metric(client, "kvanta:generation_tokens_total", name) >= 8
            assert metric(client, "kvanta:model_loads_total", name) == 1
        assert "kvanta:model_state" in client.get("/metrics").text
        assert client.get("/").status_code == 200
        for head in ("/health", "/v1/models"):
            assert client.head(head).status_code == 200


def test_unknown_models_get_the_names_of_known_ones(tmp_path: Path) -> None:
    with router(tmp_path, entry("a"), entry("b"), words=("--api-key", "secret")) as (_, client):
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        for body in ({"prompt": "x"}, {"prompt": "x", "model": "c"}):
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 404
            assert "a, b" in error_of(answer)["message"]
            assert error_of(answer)["code"] == "model_not_found"
        assert client.post("/v1/completions", json={"prompt": "x", "model": 3}).status_code == 400
        assert client.post("/v1/completions", content=b"{").status_code == 400
        assert "a, b" in client.post("/api/chat", json={"model": "c"}).json()["error"]
        assert client.get("/v1/models/c").status_code == 404
        assert client.post("/api/pull", json={"model": "b"}).json() == {"status": "success"}
        assert client.post("/models/load", json={"model": "c"}).status_code == 404
        assert set(states(client).values()) == {"unloaded"}
        assert complete(client, "a")["model"] == "a"
        assert client.get("/v1/models/a").json()["max_model_len"] == 512


def test_a_default_takes_every_name(tmp_path: Path) -> None:
    with router(tmp_path, entry("a"), entry("b"), default="b") as (_, client):
        assert complete(client, "gpt-4o")["model"] == "b"
        answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert answer.json()["model"] == "b"
        assert client.post("/v1/completions", content=b"{").status_code == 400
        assert client.get("/nowhere").status_code == 404
        assert states(client) == {"a": "unloaded", "b": "loaded"}


def test_clients_that_come_at_once_load_a_model_once(tmp_path: Path) -> None:
    with router(tmp_path, entry("a")) as (_, client), ThreadPoolExecutor(4) as threads:
        texts = [each["choices"][0]["text"] for each in threads.map(lambda _: complete(client, "a"), range(4))]
        assert len(set(texts)) == 1
        assert metric(client, "kvanta:model_loads_total", "a") == 1


def test_the_idle_model_that_was_used_least_recently_makes_room(tmp_path: Path) -> None:
    with router(tmp_path, entry("a"), entry("b"), entry("c")) as (process, client):
        before = resident(process.pid)
        for name in ("a", "b", "a"):
            complete(client, name)
        assert len(children(process.pid)) == 2
        full = resident(process.pid)
        complete(client, "c")
        assert states(client) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert len(children(process.pid)) == 2
        complete(client, "b")
        assert states(client) == {"a": "unloaded", "b": "loaded", "c": "loaded"}
        for name in ("b", "c"):
            assert client.post("/models/unload", json={"model": name}).json() == {"success": True}
        wait_until(lambda: set(states(client).values()) == {"unloaded"})
        after = resident(process.pid)
        assert not children(process.pid)
        assert full - before > 2 * (9 << 20)
        assert after - before < (full - before) / 4
        assert metric(client, "kvanta:model_memory_bytes", "b") == 0


def test_a_stream_goes_on_while_another_model_loads(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with router(tmp_path, entry("a", options={**SMALL, "max-num-seqs": 1}), entry("b")) as (_, client):
        complete(client, "a")
        times: list[float] = []
        with client.stream("POST", "/v1/completions", json={**LONG, "model": "a", "n": 200}) as response:
            lines = events(response)
            data = [next(lines)]
            loaded: list[float] = []

            def load() -> None:
                complete(client, "b")
                loaded.append(time.perf_counter())

            loader = threading.Thread(target=load)
            begin = time.perf_counter()
            loader.start()
            for line in lines:
                data.append(line)
                times.append(time.perf_counter())
                if loaded:
                    break
        loader.join()
        during = [each for each in times if begin < each < loaded[0]]
        gaps = [later - earlier for earlier, later in itertools.pairwise(during)]
        assert len(during) > 1
        record_property("largest_gap_s", max(gaps))
        print(f"largest gap of the stream: {1e3 * max(gaps):.0f} ms in {loaded[0] - begin:.1f} s of loading")
        # The client has left: its request ends, and the model is idle.
        wait_until(lambda: client.get("/load").json()["server_load"] == 0)
        assert states(client) == {"a": "loaded", "b": "loaded"}


def test_requests_finish_before_their_model_is_unloaded(tmp_path: Path) -> None:
    body = {**LONG, "model": "a", "n": 40}
    with router(tmp_path, entry("a"), entry("b"), budget=ONE) as (_, client), ThreadPoolExecutor(2) as threads:
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = events(response)
            data = [next(lines)]
            other = threads.submit(complete, client, "b")
            wait_until(lambda: states(client)["a"] == "unloading")
            again = threads.submit(complete, client, "a")  # waits until b has been loaded and is idle
            data += lines
        assert data[-1] == "[DONE]"
        choices = [choice for line in data[:-1] for choice in json.loads(line).get("choices", [])]
        finished = [choice["index"] for choice in choices if choice["finish_reason"] == "length"]
        assert sorted(finished) == list(range(40))
        assert other.result(120)["model"] == "b"
        assert again.result(120)["model"] == "a"
        assert states(client) == {"a": "loaded", "b": "unloaded"}
        assert metric(client, "kvanta:model_loads_total", "a") == 2


def test_a_load_that_fails_is_answered_and_the_server_goes_on(tmp_path: Path) -> None:
    models = (
        entry("a"),
        entry("nowhere", "/nowhere"),
        entry("bad-format", options={**SMALL, "kv-cache-dtype": "mla_fp8"}),
        entry("bad-template", options={**SMALL, "chat-template": "/nowhere.jinja"}),
        entry("large", memory="1GiB"),
    )
    with router(tmp_path, *models) as (process, client):
        complete(client, "a")
        expected = {
            "nowhere": "there is no model '/nowhere'",
            "bad-format": "mla_fp8",
            "bad-template": "the chat template '/nowhere.jinja' cannot be read",
            "large": "need 1.0 GiB, and all models may take 20.0 MiB (--memory-budget)",
        }
        for name, reason in expected.items():
            answer = client.post("/v1/completions", json={"model": name, "prompt": "x"})
            assert answer.status_code == 500
            assert reason in error_of(answer)["message"]
            assert error_of(answer)["code"] == "model_load_failed"
            status = client.get(f"/v1/models/{name}").json()["status"]
            assert status["failed"] is True
            assert reason in status["error"]
        assert states(client)["a"] == "loaded"  # it was not unloaded for them
        assert len(children(process.pid)) == 1
        assert metric(client, "kvanta:model_failures_total", "nowhere") == 1
        complete(client, "a")


def test_a_lost_process_is_started_again(tmp_path: Path) -> None:
    with router(tmp_path, entry("a")) as (process, client):
        complete(client, "a")
        (child,) = children(process.pid)
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: states(client)["a"] == "unloaded")
        assert "SIGKILL" in client.get("/v1/models/a").json()["status"]["error"]
        assert complete(client, "a")["model"] == "a"
        assert client.get("/v1/models/a").json()["status"] == {"value": "loaded"}
        with client.stream("POST", "/v1/completions", json={**LONG, "model": "a", "n": 200}) as response:
            lines = events(response)
            next(lines)
            os.kill(children(process.pid)[0], signal.SIGKILL)
            with pytest.raises(httpx2.RemoteProtocolError):
                list(lines)


def test_keep_alive_and_llama_cpps_endpoints(tmp_path: Path) -> None:
    with router(tmp_path, entry("a"), entry("b", keep_alive="1s")) as (_, client):
        unload = client.post("/api/generate", json={"model": "a", "keep_alive": 0})
        assert unload.json()["done_reason"] == "unload"
        assert states(client)["a"] == "unloaded"  # and was not loaded for it
        assert client.post("/api/generate", json={"model": "a"}).json()["done_reason"] == "load"
        assert states(client)["a"] == "loaded"
        text = client.post("/api/chat", json={"model": "a", "messages": [], "keep_alive": 0})
        assert text.json()["message"] == {"role": "assistant", "content": ""}
        wait_until(lambda: states(client)["a"] == "unloaded")
        body = {"model": "a", "prompt": "Once", "raw": True, "stream": False, "options": {"num_predict": 2}}
        answer = client.post("/api/generate", json={**body, "keep_alive": "500ms"})
        assert answer.json()["done"] is True
        assert "x-kvanta-ignored" not in answer.headers
        wait_until(lambda: states(client)["a"] == "unloaded")
        assert "keep_alive" in client.post("/api/generate", json={**body, "keep_alive": "soon"}).json()["error"]

        assert client.post("/models/load", json={"model": "b"}).json() == {"success": True}
        wait_until(lambda: states(client)["b"] == "loaded")
        wait_until(lambda: states(client)["b"] == "unloaded")  # by its own keep_alive
        refused = client.post("/models/unload", json={"model": "b"})
        assert refused.status_code == 400
        page = client.post("/models/load", json={"model": "b"}, headers={"Origin": "http://evil"})
        assert page.status_code == 403
        client.post("/models/load", json={"model": "b"})
        client.post("/models/unload", json={"model": "b"})  # while it is being loaded
        wait_until(lambda: states(client)["b"] == "unloaded")
        assert metric(client, "kvanta:model_loads_total", "b") == 2
        client.post("/models/load", json={"model": "a"})
        wait_until(lambda: states(client)["a"] == "loaded")
        assert client.get("/api/ps").json()["models"][0]["expires_at"] > "2100"  # a request's keep_alive has ended


def test_a_signal_lets_requests_finish_and_ends_the_processes(tmp_path: Path) -> None:
    with router(tmp_path, entry("a")) as (process, client):
        with client.stream("POST", "/v1/completions", json={**LONG, "model": "a", "n": 20}) as response:
            lines = events(response)
            data = [next(lines)]
            processes = children(process.pid)
            process.send_signal(signal.SIGTERM)
            data += lines
        assert data[-1] == "[DONE]"
        assert process.wait(60) == 0
        assert not any(Path(f"/proc/{each}").exists() for each in processes)


def test_processes_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    with router(tmp_path, entry("a")) as (process, client):
        complete(client, "a")
        processes = children(process.pid)
        assert processes
        process.kill()
        wait_until(lambda: not any(Path(f"/proc/{each}").exists() for each in processes))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "models must be a list of at least one model"),
        ({"models": [{"name": "a"}]}, "models[0]: path must be a text"),
        ({"models": [entry("a"), entry("a")]}, "two models have the name 'a'"),
        ({"models": [entry("a", options={"max-model-length": 1})]}, "models[0]: unknown option max_model_length"),
        ({"models": [entry("a", options={"port": 1})]}, "port is the server's: give it on the command line"),
        ({"models": [entry("a", options={"served-model-name": "x"})]}, "served_model_name is not supported"),
        ({"models": [entry("a", memory="much")]}, "models[0]: memory: 'much' is not a size in bytes"),
        ({"models": [entry("a", keep_alive="x")]}, "keep_alive must be seconds or a duration"),
        ({"models": [entry("a", size=1)]}, "unknown field 'size'"),
        ({"models": [entry("a")], "default": "b"}, "default is 'b', which is none of a"),
    ],
)
def test_errors_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: dict[str, Any], reason: str
) -> None:
    file = tmp_path / "models.json"
    file.write_text(json.dumps(content))
    assert main(["serve", "--models", str(file)]) == 2
    assert reason in capsys.readouterr().err
    assert main(["serve", "--models", str(file), MODEL]) == 2
    assert "--models and MODEL exclude each other" in capsys.readouterr().err
