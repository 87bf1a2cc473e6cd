"""The prefix cache on disk, per cache format: time to the first token of a long prompt, and the cost of write-behind.

    python benchmarks/prefix_cache.py smollm2 --json docs/results/prefix-cache.json --plot docs/results/prefix-cache.png

First token: in every turn, a new engine computes the prompt and writes its pages (cold), and another new engine finds
them in the folder (warm). Both have run a short prompt before, so that weights are in memory. Files may be in the
system's file cache, as after a restart of the server alone; --drop-caches empties it before warm runs (needs root). The
tokens are compared.

Write-behind: two engines, one with a folder and one without, take turns with the same new prompts, and with decode of
--writing-requests requests: many short turns, since the machine's own speed drifts by more than writing costs. What the
disk still has to take when a work ends is counted apart. Figures are medians of turns, by the wall clock. Rows of an
earlier run with the same model and prompt stay in the JSON file, so that formats and parts can be measured one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from reports import earlier_rows

from kvanta import _core
from kvanta.checkpoint.resolve import resolve_model
from kvanta.engine.config import engine_config
from kvanta.terminal.pictures import check_picture, new_figure, save_figure

FORMATS = ("bf16", "fp8", "int8", "int4")
PARTS = ("first-token", "writing")
OUTPUT_TOKENS = 16
_DECODE_PROMPT = 32  # tokens
Row = dict[str, Any]


class Prompts:
    """Random prompts, each a new one."""

    def __init__(self, vocab: int) -> None:
        self._random = np.random.default_rng(3)
        self._vocab = vocab

    def next(self, tokens: int) -> list[int]:
        return [int(token) for token in self._random.integers(0, self._vocab, size=tokens)]


def run(engine: _core.Engine, prompts: list[list[int]], output_tokens: int) -> tuple[list[list[int]], float, int]:
    """New tokens of each prompt, seconds to the first one of any, and cached tokens of all prompts."""
    sampling = _core.SamplingParams()
    sampling.max_tokens, sampling.ignore_eos, sampling.temperature = output_tokens, True, 0.0
    tokens: list[list[int]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    first = 0.0
    begin = time.monotonic()
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, sampling)
    while (outputs := engine.step()) is not None:
        for each in outputs:
            if each.error:
                raise SystemExit(f"error: {each.error}")
            first = first or time.monotonic() - begin
            cached[int(each.id)] = each.cached_tokens
            tokens[int(each.id)].extend(each.tokens)
    return tokens, first, sum(cached)


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def make_engine(options: argparse.Namespace, name: str, max_model_len: int, max_num_seqs: int, folder: str) -> Any:
    arguments = {
        "kv_cache_dtype": name,
        "weight_dtype": options.weight_dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "kv_cache_dir": folder,
        "threads": options.threads,
    }
    return _core.Engine(engine_config(options.folder, arguments))


def first_token_turn(
    options: argparse.Namespace, name: str, prompt: list[int], samples: dict[str, list[float]]
) -> None:
    """Adds the seconds of one cold run and of one after a restart, and what was stored and read."""
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        wanted: list[list[int]] = []
        for what in ("cold", "warm"):
            if what == "warm" and options.drop_caches:
                drop_caches()
            engine = make_engine(options, name, len(prompt) + OUTPUT_TOKENS + 1, 1, folder)
            run(engine, [prompt[-40:]], 1)
            tokens, first, cached = run(engine, [prompt], OUTPUT_TOKENS)
            wanted = wanted or tokens
            if tokens != wanted:
                raise SystemExit(f"error: {name}: tokens after a hit are not those of the cold run")
            if what == "warm" and cached < len(prompt) - 128:
                raise SystemExit(f"error: {name}: {cached} of {len(prompt)} tokens were found")
            samples[what].append(first)
            engine.flush_prefix_cache()
            disk = engine.stats()["disk"]
            if what == "cold":  # after a restart, the folder may still be scanned
                samples["stored_mib"].append(disk["bytes"] / 2**20)
            del engine
        samples["read_gb_s"].append(disk["read_bytes"] / disk["read_seconds"] / 1e9)


def first_token_row(samples: dict[str, list[float]]) -> Row:
    cold, warm = median(samples["cold"]), median(samples["warm"])
    return {
        "stored_mib": median(samples["stored_mib"]),
        "cold_s": cold,
        "warm_s": warm,
        "turns": len(samples["cold"]),
        "times": cold / warm,
        "read_gb_s": median(samples["read_gb_s"]),
    }


def writing_row(options: argparse.Namespace, name: str, prompts: Prompts) -> Row:
    """Speed with write-behind as a share of the speed without, of prompts and of decode."""
    works = {
        "prompt": (1, options.writing_prompt_tokens, 1),
        "decode": (options.writing_requests, _DECODE_PROMPT, options.writing_output_tokens),
    }
    longest = max(tokens + output for _, tokens, output in works.values()) + 1
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        engines = {
            place: make_engine(options, name, longest, options.writing_requests, place) for place in (folder, "")
        }
        shares: dict[str, list[float]] = defaultdict(list)
        behind: list[float] = []
        for turn in range(options.writing_turns + 1):
            for work, (count, tokens, output) in works.items():
                batch = [prompts.next(tokens) for _ in range(count)]
                seconds = {}
                for place in (folder, "") if turn % 2 == 0 else ("", folder):
                    begin = time.monotonic()
                    run(engines[place], batch, output)
                    seconds[place] = time.monotonic() - begin
                    if place:
                        engines[place].flush_prefix_cache()
                        behind.append(time.monotonic() - begin - seconds[place])
                if turn > 0:  # the first one warms both engines up
                    shares[work].append(seconds[""] / seconds[folder])
        disk = engines[folder].stats()["disk"]
        if disk["dropped_records"] or disk["write_errors"] or not disk["written_bytes"]:
            raise SystemExit(f"error: {name}: not everything was written: {disk}")
    return {
        **{f"{work}_share": median(each) for work, each in shares.items()},
        "writing_turns": options.writing_turns,
        "behind_s": max(behind),
        "write_gb_s": disk["written_bytes"] / disk["write_seconds"] / 1e9,
    }


def write_plot(file: str, report: dict[str, Any]) -> None:
    """Plots the time to the first token, cold and after a restart, of every format."""
    rows = [row for row in report["rows"] if "cold_s" in row]
    figure = new_figure(8.5, 1.2 + 0.75 * len(rows))
    axes = figure.subplots()
    places = np.arange(len(rows))
    bars = {"cold": (-0.2, "#7a8794"), "warm": (0.2, "#0b6e99")}
    for what, (offset, color) in bars.items():
        label = "cold: computed" if what == "cold" else "after a restart: read from disk"
        drawn = axes.barh(places + offset, [row[f"{what}_s"] for row in rows], 0.38, color=color, label=label)
        texts = [f"{row[f'{what}_s']:.3g} s" + (f" (1/{row['times']:.0f})" if what == "warm" else "") for row in rows]
        axes.bar_label(drawn, texts, padding=3, fontsize=9)
    axes.set_yticks(places, [row["format"] for row in rows])
    axes.set_title(f"{report['model']}: first token of a prompt of {report['prompt_tokens']:,} tokens", fontsize=11)
    axes.set_xlabel("seconds")
    axes.margins(x=0.12)
    axes.grid(True, axis="x", alpha=0.25, linewidth=0.6)
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--prompt-tokens", type=int, default=7680)
    parser.add_argument("--turns", type=int, default=3, help="of the first token, of which the medians count")
    parser.add_argument("--writing-turns", type=int, default=14)
    parser.add_argument("--writing-prompt-tokens", type=int, default=1024)
    parser.add_argument("--writing-requests", type=int, default=8)
    parser.add_argument("--writing-output-tokens", type=int, default=96)
    parser.add_argument("--weight-dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dir", help="folder for the files (default: the system's for temporary files)")
    parser.add_argument("--drop-caches", action="store_true", help="read from the disk itself")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", help="picture of the time to the first token")
    options = parser.parse_args()
    if options.plot:
        check_picture(options.plot)
    warnings.simplefilter("ignore")
    options.folder = str(resolve_model(options.model).path)
    prompts = Prompts(_core.read_model_info(options.folder).vocab)
    prompt = prompts.next(options.prompt_tokens)
    settings: Row = {
        "model": options.model,
        "prompt_tokens": options.prompt_tokens,
        "weight_dtype": options.weight_dtype,
        "dropped_caches": options.drop_caches,
    }
    rows = {row["format"]: row for row in earlier_rows(options.json, settings)}
    for name in options.formats:
        rows.setdefault(name, {"format": name})
    samples: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in options.formats}
    if "first-token" in options.parts:
        for _ in range(options.turns):
            for name in options.formats:
                first_token_turn(options, name, prompt, samples[name])
        for name in options.formats:
            row = rows[name] = rows[name] | first_token_row(samples[name])
            print(f"{name:18} cold {row['cold_s']:.3f} s, warm {row['warm_s']:.3f} s: {row['times']:.1f} times")
    if "writing" in options.parts:
        for name in options.formats:
            row = rows[name] = rows[name] | writing_row(options, name, prompts)
            print(
                f"{name:18} with write-behind, prompts run at {row['prompt_share']:.1%} and decode at "
                f"{row['decode_share']:.1%} of the speed without; the disk finishes {row['behind_s']:.3f} s later",
                flush=True,
            )
    report = {**settings, "rows": list(rows.values())}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.plot:
        write_plot(options.plot, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
