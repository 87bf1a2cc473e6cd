#!/usr/bin/env python3
"""Counts the files and functions of python/kvanta that one call passes through, after one that warmed everything up.

    tools/call_path.py [--list]

The calls: LLM.generate with a prompt of two words, and a chat request that is not streamed, through HTTP; on the model
that is shipped, four tokens each. --list writes every file with its functions, in the order of their first call.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "kvanta"
sys.path[:0] = [str(PACKAGE.parent), str(ROOT / "tests" / "python")]

from live_server import live_server  # noqa: E402  (the tests' own server)

from kvanta import LLM, SamplingParams  # noqa: E402


class CallPath:
    """Functions of the package that run while it is active, in all threads that existed or began since `watch`."""

    def __init__(self) -> None:
        self.active = False
        self.functions: dict[str, dict[str, int]] = {}
        """Calls by file and qualified name."""

    def watch(self) -> None:
        """Observes this thread, and those that begin later."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if self.active and event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            file = str(Path(frame.f_code.co_filename).relative_to(PACKAGE))
            names = self.functions.setdefault(file, {})
            names[frame.f_code.co_qualname] = names.get(frame.f_code.co_qualname, 0) + 1

    def follow(self, call: Callable[[], Any]) -> None:
        """Counts from nothing what `call` passes through."""
        self.functions = {}
        self.active = True
        try:
            call()
        finally:
            self.active = False

    def print(self, name: str, with_list: bool) -> None:
        """One line, and the functions if wanted."""
        functions = sum(len(names) for names in self.functions.values())
        calls = sum(sum(names.values()) for names in self.functions.values())
        if with_list:
            for file, names in self.functions.items():
                print(f"  {file}: {', '.join(names)}")
        print(f"{name}: {len(self.functions)} files, {functions} functions, {calls} calls")


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    path = CallPath()
    path.watch()
    llm = LLM("stories260k", threads=1, kv_cache_memory_bytes="16MiB")
    params = SamplingParams(max_tokens=4, temperature=0)
    for _ in range(2):
        path.follow(lambda: llm.generate("Once upon", params))
    path.print("LLM.generate", options.list)
    body = {"messages": [{"role": "user", "content": "Once upon"}], "max_tokens": 4, "temperature": 0}
    with live_server() as server:

        def post(client: httpx2.Client) -> None:
            client.post("/v1/chat/completions", json=body).raise_for_status()

        for _ in range(2):
            path.follow(lambda: post(server.client))
    path.print("POST /v1/chat/completions", options.list)
    return 0


if __name__ == "__main__":
    sys.exit(main())
