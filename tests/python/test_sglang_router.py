"""SGLang's own router, unmodified, in front of two servers: it needs nothing but the packages."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest
from live_server import LiveServer, live_server
from server_process import free_port

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed"
)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LiveServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(live_server(options={"block_size": 16})) for _ in range(2)]


@pytest.fixture(scope="module")
def router(servers: list[LiveServer]) -> Iterator[httpx2.Client]:
    port = free_port()
    words = ["--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    words += ["--prometheus-port", str(free_port()), "--worker-urls", *(server.url for server in servers)]
    command = [sys.executable, "-m", "sglang_router.launch_router", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            pause = threading.Event()
            for _ in range(300):
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx2.TransportError:
                    pass
                assert process.poll() is None, "the router has ended"
                pause.wait(0.1)
            yield client
    finally:
        process.kill()
        process.wait()


def ask(client: httpx2.Client, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"model": "stories260k", "prompt": prompt, "max_tokens": 12, "temperature": 0.8, "seed": 7, **more}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_prompts_go_where_their_prefix_is_and_answers_are_the_same(
    servers: list[LiveServer], router: httpx2.Client
) -> None:
    stems = [f"{name} went to the big park with a red ball and a very small dog. " * 3 for name in ("Tim", "Lily")]
    prompts = [stem + f"Day {turn}: " for turn in range(4) for stem in stems]
    answers = [ask(router, prompt) for prompt in prompts]
    hits = [server.front.loaded.stats()["cached_tokens"] for server in servers]
    least = len(servers[0].front.tokenizer.encode(stems[0])) // 16 * 16
    assert sum(hits) >= 6 * least, "every prompt but the first of each kind finds its beginning"
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["choices"][0]["text"] == ask(servers[0].client, prompt)["choices"][0]["text"]


def test_streams_pass_through(router: httpx2.Client) -> None:
    whole = ask(router, "Once upon a time")["choices"][0]["text"]
    body = {"model": "stories260k", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.8, "seed": 7}
    with router.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    texts = [httpx2.Response(200, content=line).json()["choices"][0]["text"] for line in lines[:-1]]
    assert "".join(texts) == whole
