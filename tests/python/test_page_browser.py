"""The server's page in Chromium, through its DevTools protocol: a prompt, the answer, points in the charts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from live_server import LiveServer, live_server

ANSWER = "**bold** <img src=x onerror=alert(1)>\n\n- one\n- two\n\n```\na = 1\n```"
NAME = """</script></title></span><img src=x onerror="document.title = 'steered'">\\\""""
SECONDS = 60.0  # until a test fails


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        running.service.names.insert(0, NAME)
        yield running


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._count = 0
        self._events: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        await self._socket.send_json({"id": self._count, "method": method, "params": params})
        while True:
            message = await self._receive()
            if message.get("id") == self._count:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    async def open(self, url: str) -> None:
        """Until the page is loaded."""
        await self.call("Page.enable")
        await self.call("Page.navigate", url=url)
        while "Page.loadEventFired" not in self._events:
            await self._receive()

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._socket.receive_json(timeout=SECONDS)
        self._events.append(message.get("method", ""))
        return message

    async def evaluate(self, script: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def wait_for(self, script: str) -> None:
        """Until the expression is true."""
        met = await self.evaluate(
            f"new Promise((done) => {{ setTimeout(() => done(false), {int(SECONDS * 500)});"
            f"const poll = () => (({script}) ? done(true) : setTimeout(poll, 50)); poll(); }})"
        )
        assert met, f"never true: {script}; the page: {await self.evaluate('document.body.innerText')}"


async def use_page(url: str, folder: Path) -> dict[str, Any]:
    """Types a prompt as a user does; returns parts of the page."""
    program = shutil.which("chromium-headless-shell")
    assert program, "the package chromium-headless-shell is missing (scripts/apt-packages.txt)"
    words = [program, "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={folder}"]
    words.append("about:blank")
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        port = next(match[1] for line in lines if (match := re.search(r"ws://127\.0\.0\.1:(\d+)/", line)))
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as response:
                pages = json.loads(await response.text())
            address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                browser = Browser(socket)
                await browser.open(f"{url}/")
                await browser.wait_for("document.querySelector('#health').className === 'dot up'")
                await browser.evaluate(
                    "document.querySelector('#system').value = 'Be kind.';"
                    "document.querySelector('#tokens').value = 30; document.querySelector('#temperature').value = 0;"
                    "document.querySelector('#text').focus()"
                )
                await browser.call("Input.insertText", text="Once upon a time")
                await browser.evaluate("document.querySelector('#send').click()")
                await browser.wait_for("/\\d+ tokens/.test(document.querySelector('.note')?.textContent ?? '')")
                figures = "[...document.querySelectorAll('figure')]"
                await browser.wait_for(  # one request: a point without neighbours
                    f"{figures}.find((each) => each.innerText.startsWith('Time to first token'))"
                    "?.querySelector('.dots')?.getAttribute('d')"
                )
                answer = await browser.evaluate("document.querySelector('.assistant .answer').innerText")
                rendered = await browser.evaluate(
                    "import('./page/markdown.js').then(({ renderMarkdown }) => {"
                    f"const box = document.createElement('div'); box.append(...renderMarkdown({json.dumps(ANSWER)}));"
                    "return box.innerHTML; })"
                )
                model = await browser.evaluate("document.querySelector('#model').textContent")
                images = await browser.evaluate("document.querySelectorAll('img').length")
                title = await browser.evaluate("document.title")
                return {"answer": answer, "rendered": rendered, "model": model, "images": images, "title": title}
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the program is a script that starts the browser
        process.wait()


def test_a_prompt_its_answer_and_the_charts(server: LiveServer, tmp_path: Path) -> None:
    seen = asyncio.run(use_page(server.url, tmp_path))
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Once upon a time"}]
    response = server.post("/v1/chat/completions", messages=messages, max_tokens=30, temperature=0)
    expected = response.json()["choices"][0]["message"]["content"]
    assert expected.split()  # the page's answer has its words: Markdown may fold white space
    assert seen["answer"].split() == expected.split()
    assert (seen["model"], seen["images"], seen["title"]) == (NAME, 0, f"{NAME} – Kvanta"), "a name is a text"
    assert seen["rendered"] == (
        "<p><strong>bold</strong> &lt;img src=x onerror=alert(1)&gt;</p>"
        "<ul><li>one</li><li>two</li></ul><pre><code>a = 1</code></pre>"
    )
