"""Connections that send half a header, too many of them, large headers, foreign names, forged addresses."""

from __future__ import annotations

import json
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import httpx2
import pytest
from live_server import LiveServer, error_of, events, live_server
from serve_command import LONG, SMALL, serving

from kvanta.server.http.connections import limited
from kvanta.server.http.hosts import AllowedHosts

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(protocol=limited(8, 0.5)) as running:
        yield running


@pytest.fixture(scope="module")
def patient() -> Iterator[LiveServer]:
    """A server that waits for a header longer than a test may take."""
    with live_server(hosts=AllowedHosts(["box.lan"]), priorities=True, protocol=limited(8, 600)) as running:
        yield running


def connect(server: LiveServer) -> socket.socket:
    connection = socket.create_connection((server.client.base_url.host, server.client.base_url.port or 0))
    connection.settimeout(30)
    return connection


def test_half_a_header_is_not_waited_for(server: LiveServer) -> None:
    for sent in (b"", HALF):
        with connect(server) as connection:
            connection.sendall(sent)
            assert connection.recv(1) == b""


def test_what_is_no_http_gets_an_error_as_any_other(server: LiveServer) -> None:
    for sent in (b"NO HTTP AT ALL\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n"):
        with connect(server) as connection, connection.makefile("rb") as answer:
            connection.sendall(sent)
            assert answer.readline() == b"HTTP/1.1 400 \r\n"
            head, _, body = answer.read().partition(b"\r\n\r\n")
        assert b"Content-Type: application/json" in head
        error = json.loads(body)["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("the request is not valid HTTP")


def test_half_a_second_header_is_not_waited_for(server: LiveServer) -> None:
    with connect(server) as connection, connection.makefile("rb") as answers:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = b"".join(iter(answers.readline, b"\r\n"))
        assert head.startswith(b"HTTP/1.1 200")
        (length,) = re.findall(rb"(?i)^content-length: (\d+)", head, re.MULTILINE)
        answers.read(int(length))
        connection.sendall(HALF)
        assert answers.read(1) == b""


def test_a_header_may_come_in_pieces(patient: LiveServer) -> None:
    with connect(patient) as connection:
        for piece in (b"GET /health HT", b"TP/1.1\r\nHost: local", b"host\r\n\r\n"):
            connection.sendall(piece)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_request_may_take_longer_than_its_header(server: LiveServer) -> None:
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
    for texts in (4, 16, 64, 256):
        begin = time.perf_counter()
        assert server.post("/v1/completions", **body, n=texts).status_code == 200
        if time.perf_counter() - begin > 0.8:  # longer than the time for a header
            return
    pytest.fail("no request took that long")


def test_idle_connections_make_room(patient: LiveServer) -> None:
    """More than the limit send half a header: who has something to ask is served."""
    with ExitStack() as stack:
        held = [stack.enter_context(connect(patient)) for _ in range(20)]
        for connection in held:
            connection.sendall(HALF[:20])
        with httpx2.Client(base_url=patient.url, timeout=30) as client:
            assert client.get("/health").status_code == 200
        with suppress(ConnectionResetError):  # the system may say so of a connection closed with bytes unread
            assert held[0].recv(1) == b""


def test_a_large_header_is_refused(patient: LiveServer) -> None:
    assert patient.client.get("/health", headers={"X-Large": "a" * 60_000}).status_code == 200
    refused = patient.client.get("/health", headers={"X-Large": "a" * 66_000})
    assert refused.status_code == 431
    assert "65536" in error_of(refused)["message"]


def test_a_foreign_name_is_refused(patient: LiveServer) -> None:
    for name in ("localhost:80", "box.lan", "127.0.0.1"):
        assert patient.client.get("/v1/models", headers={"Host": name}).status_code == 200
    for path in ("/v1/models", "/", "/metrics", "/health"):
        refused = patient.client.get(path, headers={"Host": "evil.example"})
        assert refused.status_code == 403
        assert error_of(refused)["code"] == "host_not_allowed"
        assert "'evil.example'" in error_of(refused)["message"]
        assert "--allowed-hosts" in error_of(refused)["message"]


def test_priorities_where_they_are_allowed(patient: LiveServer) -> None:
    assert patient.completion(prompt="a", max_tokens=1, priority=-5)["choices"]


def test_a_process_serves_as_its_options_say() -> None:
    """The address in the log is the client's; foreign names are refused; half a header ends in time."""
    log: list[str] = []
    with serving("stories260k", *SMALL, "--header-timeout", "0.5", log=log) as (process, client):
        client.get("/version", headers={"X-Forwarded-For": '6.6.6.6 "POST /fake" 200'})
        assert client.get("/version", headers={"Host": "evil.example"}).status_code == 403
        with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as connection:
            connection.settimeout(30)
            connection.sendall(HALF)
            assert connection.recv(1) == b""
        process.terminate()
        assert process.wait(60) == 0
    lines = [line for line in log if "/version" in line]
    assert len(lines) == 2
    assert all(" 127.0.0.1:" in line and "6.6.6.6" not in line for line in lines)


def test_a_trusted_proxy_tells_the_client() -> None:
    log: list[str] = []
    with serving("stories260k", *SMALL, "--forwarded-allow-ips", "127.0.0.1", log=log) as (process, client):
        client.get("/version", headers={"X-Forwarded-For": "6.6.6.6"})
        process.terminate()
        process.wait(60)
    assert any(" 6.6.6.6:" in line for line in log)


def patient_get(client: httpx2.Client, path: str) -> int:
    """The status, once a connection is not reset: without a free place, a server closes new ones for a while."""
    end = time.monotonic() + 60
    while True:
        try:
            return int(client.get(path).status_code)
        except httpx2.TransportError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-sent headers take no more places than there are."""
    popen = subprocess.Popen

    def small(*arguments: object, **named: object) -> object:
        return popen(*arguments, **named, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120)))  # type: ignore

    monkeypatch.setattr(subprocess, "Popen", small)
    with serving("stories260k", *SMALL) as (_, client), ExitStack() as stack:
        address = (client.base_url.host, client.base_url.port or 0)
        for _ in range(200):
            stack.enter_context(socket.create_connection(address)).sendall(HALF)
        assert patient_get(client, "/health") == 200


def test_a_server_that_drains_says_so() -> None:
    with serving("stories260k", *SMALL, "--max-num-seqs", "1") as (process, client):
        with client.stream("POST", "/v1/completions", json={**LONG, "n": 40}) as response:
            lines = events(response)
            next(lines)
            process.send_signal(signal.SIGTERM)
            with httpx2.Client(base_url=client.base_url, timeout=60) as other:
                patience = threading.Event()
                while (health := other.get("/health")).status_code == 200:
                    patience.wait(0.01)
                assert health.status_code == 503
                assert "shutting down" in error_of(health)["message"]
                refused = other.post("/v1/completions", json={"prompt": "a"})
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
            assert list(lines)[-1] == "[DONE]"
        assert process.wait(60) == 0


def test_a_server_for_everyone_warns() -> None:
    words = ["--port", "0", "--threads", "1", "--kv-cache-memory-bytes", "8MiB", "--host", "0.0.0.0"]
    for key, warned in (([], True), (["--api-key", "a"], False)):
        command = [sys.executable, "-m", "kvanta", "serve", "stories260k", *words, *key]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                seen = ""
                for line in process.stderr:
                    seen += line
                    if "serving " in line:
                        break
                assert ("no --api-key: everyone who can reach 0.0.0.0" in seen) == warned, seen
            finally:
                process.kill()
