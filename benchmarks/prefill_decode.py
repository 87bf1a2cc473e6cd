"""Prompts that one engine computes and another one generates from, over Redis: share taken from the store, and times.

    python benchmarks/prefill_decode.py smollm2 --json docs/results/prefill-decode.json

A server with one engine answers first. Then `kvanta serve --replicas 1 --prefill-replicas 1 --kv-store` answers the
same prompts: every token must be equal. Needs redis-server. Exits with status 1 if an answer differs, or if less than
--share of the prompt tokens came from the store.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server_process import KVANTA, free_port, server_process

ANSWER = 16


@contextmanager
def redis_server() -> Iterator[str]:
    """URL of a server that keeps nothing on disk."""
    port = free_port()
    process = subprocess.Popen(
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""], stdout=subprocess.DEVNULL
    )
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def ask(url: str, prompt: Sequence[int], tokens: int) -> tuple[list[int], int, float]:
    """Tokens, cached prompt tokens, and seconds of a whole answer."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    seconds = time.perf_counter() - begin
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["token_ids"], cached, seconds


def measure(command: Sequence[str], prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], int, float, float]]:
    """The answer of each prompt, cached prompt tokens, and seconds to its first token alone and as a whole.

    The first token is that of a prompt that differs in its first token, so that nothing is cached.
    """
    port = free_port()
    rows = []
    with server_process([*KVANTA, *command, "--no-log-requests", "--port", str(port)], port) as server:
        ask(server.url, [4] * len(prompts[0]), 1)
        for prompt in prompts:
            first = ask(server.url, [prompt[0] + 200, *prompt[1:]], 1)[2]
            tokens, cached, seconds = ask(server.url, prompt, ANSWER)
            rows.append((tokens, cached, first, seconds))
    return rows


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--format", default="int4")
    parser.add_argument("--share", type=float, default=0.95, help="of the prompts' tokens that must be loaded")
    parser.add_argument("--json", type=Path)
    values = parser.parse_args()
    prompts = [
        [3 + (number * 31 + index * index) % 197 for index in range(values.prompt_tokens)]
        for number in range(values.prompts)
    ]
    command = [values.model, "--kv-cache-dtype", values.format, "--threads", "1"]
    alone = measure(command, prompts)
    with redis_server() as store:
        apart = measure([*command, "--prefill-replicas", "1", "--kv-store", store], prompts)
    wrong = sum(left[0] != right[0] for left, right in zip(alone, apart, strict=True))
    share = sum(row[1] for row in apart) / sum(map(len, prompts))

    def row(name: str, rows: list[tuple[list[int], int, float, float]]) -> dict[str, Any]:
        return {
            "engines": name,
            "first_token_s": round(statistics.median(each[2] for each in rows), 4),
            "answer_s": round(statistics.median(each[3] for each in rows), 4),
        }

    rows = [row("one", alone), {**row("apart", apart), "loaded_share": round(share, 4), "wrong": wrong}]
    figures = {
        "model": values.model,
        "format": values.format,
        "prompt_tokens": values.prompt_tokens,
        "prompts": values.prompts,
        "rows": rows,
    }
    print(json.dumps(figures, indent=1))
    if values.json:
        values.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong or share < values.share else 0


if __name__ == "__main__":
    sys.exit(main())
