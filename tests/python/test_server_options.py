"""Options of the server: values, the key's environment variable, missing packages; the files of the page."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import fastapi
import httpx2
import pytest

from kvanta import InputError
from kvanta import server as server_package
from kvanta.server.app import page_router
from kvanta.server.options import read_options


def test_a_page(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>hello</h1>")
    (tmp_path / "page.js").write_text("1")
    (tmp_path.parent / "secret").write_text("no")
    app = fastapi.FastAPI()
    app.include_router(page_router(tmp_path))
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
    assert options.api_key == ["a", "b", "c"]
    for bad in (
        {"port": "70000"},
        {"port": "x"},
        {"request_timeout": "-1"},
        {"log_level": "loud"},
        {"allowed_origins": ["[1]"]},
        {"ssl_keyfile": "key.pem"},
        {"api_key": ["a\nb"]},
        {"api_key": [""]},
        {"max_body_bytes": "1"},
    ):
        with pytest.raises(InputError, match=next(iter(bad))):
            read_options(bad)


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANTA_API_KEY", "secret")
    assert read_options({}).api_key == ["secret"]
    assert read_options({"api_key": ["other"]}).api_key == ["other"]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else name)
    with pytest.raises(InputError, match=r"fastapi.*pip install 'kvanta\[serve\]'"):
        server_package.check_packages()
