"""`python -m kvanta.cli.demo`: the same question to the same model on several cache formats, and what each costs."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta.checkpoint.resolve import resolve_model
from kvanta.cli import report_errors
from kvanta.cli.arguments import CommandParser, ListOption, whole_number
from kvanta.cli.machine import cpu_name
from kvanta.cli.report import write_json_file
from kvanta.errors import InputError, ResourceError
from kvanta.evaluate.divergence import kl_divergence
from kvanta.llm import LLM
from kvanta.params.sampling_params import SamplingParams
from kvanta.terminal.chat.markdown import write_answer
from kvanta.terminal.progress import progress_bar
from kvanta.terminal.tables import render_table
from kvanta.text.prompts import TokenPrompt, read_prompt

TEXT = Path(__file__).parents[1] / "texts" / "treasure_island.txt"
_CHAT_PROMPT = "Explain to a child, in a few sentences, why the sky is blue and why sunsets are red."
_STORY_PROMPT = "Once upon a time"

_DESCRIPTION = """\
The same question to the same model on several formats of the KV cache, greedy, with the memory that each saves and
how close it stays to the bf16 cache: equal choices of tokens, mean KL divergence on a page of Treasure Island."""


def parser() -> CommandParser:
    """The demo's options."""
    result = CommandParser(prog="python -m kvanta.cli.demo", description=_DESCRIPTION)
    result.add_argument("--model", default="smollm2", help="folder, .gguf file or name [smollm2]")
    result.add_argument(
        "--formats", nargs="+", action=ListOption, default=["bf16", "fp8", "int8", "int4"], help="[bf16 fp8 int8 int4]"
    )
    result.add_argument("--prompt", help="another question")
    result.add_argument(
        "--max-tokens", type=whole_number, default=160, metavar="N", help="maximum tokens of each answer [160]"
    )
    result.add_argument("--context", type=whole_number, default=2048, metavar="N", help="tokens of the text [2048]")
    result.add_argument("--threads", type=whole_number, metavar="N", help="CPU threads [all]")
    result.add_argument("--json", metavar="FILE", help="write the figures as JSON to FILE")
    result.add_argument(
        "--setup",
        nargs="+",
        action=ListOption,
        default=[],
        metavar="STEP=SECONDS",
        help="times of the steps before, for --json; scripts/demo gives them",
    )
    return result


@dataclass
class _Trial:
    """One format's answer and its predictions on the text."""

    name: str
    scheme_bits: float
    bytes_per_token: float
    tokens: list[int]
    tokens_per_second: float
    choices: NDArray[np.int64]
    """The most likely token at every place of the reference's answer, given that answer's beginning."""
    logits: NDArray[np.float32]
    saturated: int


def _choose_model(requested: str) -> str:
    try:
        resolve_model(requested)
    except ResourceError as error:
        if requested != "smollm2":
            raise
        print(f"\n{error}", file=sys.stderr)
        print(
            "Without SmolLM2 the demo goes on with stories260k, a very small model that is shipped.\n", file=sys.stderr
        )
        return "stories260k"
    return requested


def _heading(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text


def _answer(llm: LLM, prompt: TokenPrompt, max_tokens: int) -> tuple[list[int], float]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    tokens: list[int] = []
    first = time.perf_counter()
    for piece, output in llm.stream(prompt, params):
        if not tokens:
            first = time.perf_counter()
        tokens = output.outputs[0].token_ids
        write_answer(piece)
    seconds = time.perf_counter() - first
    sys.stdout.write("\n\n")
    return tokens, (len(tokens) - 1) / seconds if len(tokens) > 1 else 0.0


def _try(model: str, name: str, values: argparse.Namespace, answer: list[int] | None) -> _Trial:
    """`answer`: the reference's; None for the reference itself."""
    llm = LLM(model, kv_cache_dtype=name, threads=values.threads, max_num_seqs=1)
    if llm.tokenizer.chat_template is not None:
        prompt = llm.chat_prompt([{"role": "user", "content": values.prompt or _CHAT_PROMPT}])
    else:
        prompt = read_prompt(values.prompt or _STORY_PROMPT, llm.tokenizer)
    tokens, speed = _answer(llm, prompt, values.max_tokens)
    forced = [*prompt.token_ids, *(tokens if answer is None else answer)]
    choices = llm.logits(forced)[len(prompt.token_ids) - 1 : -1].argmax(axis=-1)
    context = min(values.context, llm.config.max_model_len)
    text = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:context]
    with progress_bar(None, f"reading {len(text)} tokens of Treasure Island", "step"):
        logits = llm.logits(text)[len(text) // 2 :]  # after half of the context
    stats = llm.stats()
    info = llm.model_info
    elements = 2 * info.layers * info.kv_heads * info.head_dim
    return _Trial(
        name=name,
        scheme_bits=8 * stats["bytes_per_token"] / elements,
        bytes_per_token=stats["bytes_per_token"],
        tokens=tokens,
        tokens_per_second=speed,
        choices=choices,
        logits=logits,
        saturated=stats["saturated"],
    )


def _row(trial: _Trial, reference: _Trial) -> dict[str, Any]:
    return {
        "format": trial.name,
        "bits_per_element": trial.scheme_bits,
        "bytes_per_token": trial.bytes_per_token,
        "tokens_in_1_gib": int(2**30 / trial.bytes_per_token),
        "tokens_per_second": trial.tokens_per_second,
        "equal_tokens": float(np.mean(trial.choices == np.array(reference.tokens))),
        "equal_top_tokens": float(np.mean(reference.logits.argmax(axis=-1) == trial.logits.argmax(axis=-1))),
        "mean_kl": float(kl_divergence(reference.logits, trial.logits).mean()),
        "saturated": trial.saturated,
    }


def _table(rows: list[dict[str, Any]]) -> str:
    cells = [
        [
            row["format"],
            f"{row['bits_per_element']:.4g}",
            f"{row['bytes_per_token']:,.0f}",
            f"{row['tokens_in_1_gib']:,}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['equal_tokens']:.1%}",
            f"{row['equal_top_tokens']:.1%}",
            "-" if index == 0 else f"{row['mean_kl']:.5f}",
        ]
        for index, row in enumerate(rows)
    ]
    header = [
        "cache",
        "bits",
        "bytes/token",
        "tokens in 1 GiB",
        "tokens/s",
        "equal tokens",
        "same top token",
        "mean KL",
    ]
    return render_table(header, cells)


def _show(model: str, values: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    reference: _Trial | None = None
    names = ["bf16", *(name for name in values.formats if name != "bf16")]
    scored = 0
    for name in names:
        print(_heading(f"── {model} on a cache of {name} " + "─" * max(0, 60 - len(model) - len(name))))
        try:
            trial = _try(model, name, values, None if reference is None else reference.tokens)
        except InputError as error:
            if reference is None:
                raise
            print(f"(left out: {error})\n")
            continue
        reference = reference or trial
        scored = len(trial.logits)
        rows.append(_row(trial, reference))
    print(_heading("What it costs"))
    print(f"\n{_table(rows)}\n")
    print("  equal tokens: of the bf16 answer, those that this cache chooses too, given the same beginning.")
    print(f"  same top token, mean KL (nats per token): on {scored:,} tokens of Treasure Island, read by all alike.")
    return {"model": model, "scored_tokens": scored, "formats": rows}


def main() -> int:
    """Runs the demo; exit status as that of the command kvanta."""
    return report_errors(_main)


def _main() -> int:
    values = parser().parse_exactly(sys.argv[1:])
    began = time.perf_counter()
    report = _show(_choose_model(values.model), values)
    if values.json is not None:
        own = round(time.perf_counter() - began, 1)
        steps = {name: float(seconds) for name, _, seconds in (step.partition("=") for step in values.setup)}
        report["machine"] = {"cpu": cpu_name(), "cpus": os.cpu_count(), "system": platform.platform()}
        report["seconds"] = {**steps, "demo": own, "all": round(steps.get("all", 0.0) + own, 1)}
        write_json_file(values.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
