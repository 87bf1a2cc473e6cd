"""Options of the server: values, the key's environment variable, missing packages; the files of the page."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import fastapi
import httpx2
import pytest
from live_server import error_of, live_server

from kvanta import InputError
from kvanta import server as server_package
from kvanta.cli.arguments import given_options
from kvanta.cli.serve import parser
from kvanta.server.app import add_page
from kvanta.server.http.hosts import AllowedHosts
from kvanta.server.listening import allowed_hosts
from kvanta.server.options import OPTIONS, read_options


def test_a_page(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>hello</h1>")
    (tmp_path / "page.js").write_text("1")
    (tmp_path.parent / "secret").write_text("no")
    app = fastapi.FastAPI()
    add_page(app, tmp_path)
    transport = httpx2.ASGITransport(app)

    async def get(path: str) -> httpx2.Response:
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get(path)

    index, script, wrong, outside = (
        asyncio.run(get(path)) for path in ("/", "/page/page.js", "/page/x", "/page/..%2fsecret")
    )
    assert index.text == "<h1>hello</h1>"
    assert "text/html" in index.headers["content-type"]
    assert "javascript" in script.headers["content-type"]
    assert wrong.status_code == outside.status_code == 404


def test_options() -> None:
    given = {"port": "0", "allowed_origins": ['["https://a", "https://b"]'], "api_key": ["a,b", "c"]}
    options = read_options(given)
    assert (options.port, options.allowed_origins) == (0, ["https://a", "https://b"])
    assert options.api_key == ["a,b", "c"]
    for bad in (
        {"port": "70000"},
        {"port": "x"},
        {"request_timeout": "-1"},
        {"log_level": "loud"},
        {"allowed_origins": ["[1]"]},
        {"ssl_keyfile": "key.pem"},
        {"api_key": ["a\nb"]},
        {"api_key": [""]},
        {"api_key": ["a", ""]},
        {"max_body_bytes": "1"},
        {"max_connections": "0"},
        {"header_timeout": "0"},
        {"forwarded_allow_ips": "proxy.lan"},
        {"forwarded_allow_ips": "10.0.0.1/8"},  # it has host bits
        {"forwarded_allow_ips": "*,10.0.0.1"},
    ):
        with pytest.raises(InputError, match=next(iter(bad))):
            read_options(bad)


@pytest.mark.parametrize("given", ["*", "", "10.0.0.1, ::1,192.168.0.0/16"])
def test_trusted_proxies(given: str) -> None:
    assert read_options({"forwarded_allow_ips": given}).forwarded_allow_ips == given.replace(" ", "")


def test_keys_stay_whole_and_may_be_repeated() -> None:
    words = ["m", "--api-key", "a,b", "c", "--api-key", "d"]
    assert read_options(given_options(parser().parse_exactly(words), OPTIONS)).api_key == ["a,b", "c", "d"]


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST.:8000", True),
        ("page.localhost:1", True),
        ("127.0.0.1:8000", True),
        ("127.9.9.9", True),
        ("[::1]:8000", True),
        ("", True),
        ("box.lan:8000", True),
        ("a.b.example", True),
        ("example", False),
        ("evil.example", False),
        ("b.example.evil", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("[::2]:8000", False),
        ("192.168.1.1", False),
    ],
)
def test_names_of_the_server(host: str, allowed: bool) -> None:
    assert AllowedHosts(["box.lan", ".b.example"]).allows(host) == allowed
    assert AllowedHosts(["*"]).allows(host)


def test_the_name_is_checked_where_a_page_could_do_harm() -> None:
    local = allowed_hosts(read_options({}), "127.0.0.1")
    assert local is not None
    assert not local.allows("evil.example")
    assert allowed_hosts(read_options({"host": "::1"}), "::1") is not None
    assert allowed_hosts(read_options({"api_key": ["a"]}), "127.0.0.1") is None
    assert allowed_hosts(read_options({"host": "0.0.0.0"}), "0.0.0.0") is None
    given = allowed_hosts(read_options({"host": "0.0.0.0", "allowed_hosts": ["a.example,b.example"]}), "0.0.0.0")
    assert given is not None
    assert [given.allows(name) for name in ("a.example", "b.example:80", "c.example")] == [True, True, False]


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANTA_API_KEY", "secret,with a comma")
    assert read_options({}).api_key == ["secret,with a comma"]
    assert read_options({"api_key": ["other"]}).api_key == ["other"]


def test_paths_without_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvanta.server")
    hidden = read_options(
        {"uvicorn_access_log_exclude_prefixes": None, "disable_access_log_for_endpoints": ["/v1,/ping"]}
    )
    paths = hidden.disable_access_log_for_endpoints
    with live_server(log_requests=True, unlogged_paths=paths, max_headers=16, has_docs=False) as server:
        for path in ("/health", "/v1/models", "/ping", "/pingpong"):
            server.client.get(path)
        assert server.client.get("/openapi.json").status_code == 404
        many = {f"X-{number}": "1" for number in range(20)}
        assert error_of(refused := server.client.get("/health", headers=many))["message"].endswith(
            "(--h11-max-header-count)"
        )
        assert refused.status_code == 431
    logged = [line.partition('"GET ')[2].split('"')[0] for line in caplog.messages if '"GET ' in line]
    assert logged == ["/health", "/pingpong", "/openapi.json", "/health"]


@pytest.mark.parametrize(
    ("words", "expected"), [([], ["/v1/models"]), ([""], ["/health", "/metrics", "/page/", "/v1/models"])]
)
def test_probes_and_the_page_get_no_line(
    words: list[str], expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvanta.server")
    flag = ["--disable-access-log-for-endpoints", *words] if words else []
    values = read_options(given_options(parser().parse_exactly(["m", *flag]), OPTIONS))
    with live_server(log_requests=True, unlogged_paths=values.disable_access_log_for_endpoints) as server:
        for path in ("/health", "/metrics", "/page/", "/v1/models"):
            server.client.get(path)
    logged = [line.partition('"GET ')[2].split('"')[0] for line in caplog.messages if '"GET ' in line]
    assert logged == expected


def test_what_would_be_missed_is_refused() -> None:
    """Options whose missing effect an operator would notice are refused; their defaults have no effect and pass."""
    words = parser().parse_exactly
    asked = ["--log-requests-level 2", "--enable-log-outputs", "--enable-sleep-mode", "--otlp-traces-endpoint x:1"]
    asked += [
        "--sse-keep-alive-interval 5",
        "--fingerprint-mode custom",
        "--crash-dump-folder /tmp",
        "--kv-cache-metrics",
    ]
    asked += ['--custom-histogram-buckets {"a":[1]}', "--log-requests-target stdout", "--enable-streaming-session"]
    for line in asked:
        with pytest.raises(InputError, match="is not supported"):
            words(["m", *line.split()])
    neutral = ["--log-requests-level 0", "--sse-keep-alive-interval 0", "--weight-version default"]
    neutral += ["--log-requests-format text", "--no-enable-log-outputs", "--enable-cache-report", "--stream-interval 1"]
    for line in neutral:
        words(["m", *line.split()])


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else name)
    with pytest.raises(InputError, match=r"fastapi.*pip install 'kvanta\[serve\]'"):
        server_package.check_packages()
