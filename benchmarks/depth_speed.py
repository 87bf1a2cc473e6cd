"""Tokens per second at depth, per cache format: decode and prefill after a number of cached tokens.

    python benchmarks/depth_speed.py smollm2 --weight-dtype int4 --caches bf16 int8 int4 --decode 0 4096 7680

The engines of all formats are loaded, and each repeat of a work runs on all of them before the next one, so that a
ratio to the first format does not depend on how busy the machine was. One sequence, its first tokens in the prefix
cache. Decode is --new-tokens steps after DEPTH tokens, prefill the time to the first token after TOKENS new ones.
Results are printed only if verified: every repeat generates the same tokens, the first one after computing the whole
prompt, the others on cached pages; and a prompt that was timed in chunks generates the same tokens again from cached
pages. Rates are medians over --repeats, ratios medians of the ratios of each repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvanta import _core
from kvanta.calibration.automatic import add_query_matrices
from kvanta.checkpoint.resolve import resolve_model
from kvanta.engine.config import engine_config

_CHECKED_TOKENS = 4  # generated after a timed prompt, to verify it


@dataclass(frozen=True)
class Work:
    """Timed work: `tokens` decode steps after `depth` tokens, or the prefill of `tokens` after them."""

    kind: str
    """decode or prefill."""
    depth: int
    tokens: int


def works_of(options: argparse.Namespace, limit: int) -> list[Work]:
    """Works in the order of --decode, then --prefill; prompts are cut to fit a context of `limit` tokens."""
    works = [Work("decode", depth, options.new_tokens) for depth in options.decode]
    for text in options.prefill:
        tokens, _, depth = text.partition("@")
        works.append(Work("prefill", int(depth or 0), min(int(tokens), limit - _CHECKED_TOKENS - int(depth or 0))))
    for work in works:
        if work.tokens < 1 or work.depth < 0 or work.depth + work.tokens >= limit:
            raise SystemExit(f"error: {work.kind} of {work.tokens} after {work.depth} tokens: the model takes {limit}")
    return works


def add_works(parser: argparse.ArgumentParser) -> None:
    """Adds the options that works_of reads."""
    parser.add_argument("--decode", type=int, nargs="*", default=[0, 4096, 7680], metavar="DEPTH")
    parser.add_argument("--prefill", nargs="*", default=["1024@0", "512@7680"], metavar="TOKENS@DEPTH")
    parser.add_argument("--new-tokens", type=int, default=64, help="decode steps")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))


class Subject:
    """The engine of a cache format and its verified rates."""

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        self._names = (f"{number}" for number in count())

    @property
    def weights(self) -> str:
        """The format of its weights."""
        return self._engine.config.weight_dtype

    def _prompt(self, tokens: int, *seed: int) -> list[int]:
        random = np.random.default_rng([7, *seed])
        return [int(token) for token in random.integers(1, self._engine.info.vocab, size=tokens)]

    def _run(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float, float]:
        """Tokens, seconds until the first one, seconds of all others."""
        sampling = _core.SamplingParams()
        sampling.max_tokens, sampling.ignore_eos, sampling.temperature = new_tokens, True, 0.0
        self._engine.add(next(self._names), prompt, sampling)
        tokens: list[int] = []
        begin = first = last = time.perf_counter()
        while (outputs := self._engine.step()) is not None:
            last = time.perf_counter()
            for each in outputs:
                if each.error:
                    raise SystemExit(f"error: {each.error}")
                first = first if tokens else last
                tokens += each.tokens
        return tokens, first - begin, last - first

    def rates(self, work: Work) -> Iterator[float]:
        """Tokens per second of one repeat after another, without end; the prefix and a warm-up run before the first."""
        return self._decode(work) if work.kind == "decode" else self._prefill(work)

    def _decode(self, work: Work) -> Iterator[float]:
        prompt = self._prompt(max(1, work.depth), work.depth)
        expected, _, _ = self._run(prompt, work.tokens + 1)
        while True:
            tokens, _, seconds = self._run(prompt, work.tokens + 1)
            self._compare(work, tokens, expected)
            yield work.tokens / seconds

    def _prefill(self, work: Work) -> Iterator[float]:
        before = self._prompt(work.depth, work.depth)
        if before:
            self._run(before, 1)
        for repeat in count():
            prompt = before + self._prompt(work.tokens, work.depth, work.tokens, repeat)
            expected, seconds, _ = self._run(prompt, _CHECKED_TOKENS)
            tokens, _, _ = self._run(prompt, _CHECKED_TOKENS)
            self._compare(work, tokens, expected)
            if repeat > 0:
                yield work.tokens / seconds

    @staticmethod
    def _compare(work: Work, tokens: list[int], expected: list[int]) -> None:
        if tokens != expected:
            raise SystemExit(f"error: {work} generated {tokens}, before {expected}; no figure is worth printing")


def subject(folder: Path, cache: str, options: argparse.Namespace) -> Subject:
    """Loads the model with a cache format."""
    arguments = {
        "kv_cache_dtype": cache,
        "weight_dtype": options.weight_dtype,
        "threads": options.threads,
        "max_num_seqs": 2,  # pages for two sequences: a repeat's prompt must not evict the shared prefix
        "max_model_len": options.max_model_len,
    }
    config = engine_config(str(folder), {name: value for name, value in arguments.items() if value is not None})
    add_query_matrices(config, folder.name, arguments, allowed=True)
    return Subject(_core.Engine(config))


def measure(
    folder: Path, caches: Sequence[str], works: Sequence[Work], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row per work and cache."""
    subjects = {cache: subject(folder, cache, options) for cache in caches}
    rows = []
    for work in works:
        rates = {cache: subject.rates(work) for cache, subject in subjects.items()}
        figures: dict[str, list[float]] = {cache: [] for cache in caches}
        for _ in range(options.repeats):
            for cache in caches:
                figures[cache].append(next(rates[cache]))
        for cache in caches:
            ratio = median(own / base for own, base in zip(figures[cache], figures[caches[0]], strict=True))
            tokens_s = median(figures[cache])
            rows.append(
                {
                    "cache": cache,
                    "kind": work.kind,
                    "depth": work.depth,
                    "tokens": work.tokens,
                    "rates": figures[cache],
                    "tokens_s": tokens_s,
                    "ratio": ratio,
                    "weights": subjects[cache].weights,
                }
            )
            what = f"{cache:10} {work.kind:7} {work.tokens:5} at {work.depth:5}"
            print(f"{what}: {tokens_s:8.1f} tokens/s, {ratio:5.3f} of {caches[0]}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--caches", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--weight-dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS")
    add_works(parser)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = resolve_model(options.model).path
    works = works_of(options, options.max_model_len or _core.read_model_info(str(folder)).max_position)
    rows = measure(folder, options.caches, works, options)
    if options.json:
        options.json.write_text(json.dumps({"threads": options.threads, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
