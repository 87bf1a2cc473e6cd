"""Kvanta's cache formats compared with llama.cpp's on the same weights, text and windows.

    python benchmarks/llama_cpp.py --llama-perplexity PATH --text wiki.test.raw --json docs/results/llama-cpp.json

PATH is llama.cpp's own program, built elsewhere. It reads the model as a GGUF file of the same bf16 weights, first with
its f16 cache, then with each of its quantized caches, and reports the KL divergence of the predictions in nats per
token. The tokens of all windows must be those of `kvanta eval`. Kvanta's results come from docs/results/eval.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from exact_gguf import write_exact_gguf
from peer_rows import compare, measured_alike

from kvanta.checkpoint.resolve import resolve_model
from kvanta.evaluate.passages import Passage, beginning_of, read_text, tokenize, windows
from kvanta.fleet.plan import plan
from kvanta.options.scheme_file import is_scheme_file
from kvanta.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
FORMATS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
REFERENCE, CONTROL = "f16", "f32"  # divergence of the control: rounding alone, without a quantized cache
# Newer versions rotate K and V before they quantize them; this switches it off.
ROTATION_OFF = "LLAMA_ATTN_ROT_DISABLE"

_NUMBER = r"\s*(-?[\d.]+(?:e[-+]\d+)?|-?nan|-?inf)"
_ERROR = rf"(?:\s*±{_NUMBER})?"
_LINES = {
    "kl_mean": rf"Mean +KLD:{_NUMBER}{_ERROR}",
    "kl_median": rf"Median +KLD:{_NUMBER}",
    "kl_p99": rf"99\.0% +KLD:{_NUMBER}",
    "kl_max": rf"Maximum +KLD:{_NUMBER}",
    "top1": rf"Same top p:{_NUMBER}{_ERROR}\s*%",
    "ppl": rf"Mean PPL\(Q\) *:{_NUMBER}",
    "ppl_ratio": rf"Mean PPL\(Q\)/PPL\(base\) *:{_NUMBER}",
}


def parse_figures(output: str) -> dict[str, float]:
    """The report's figures from what --kl-divergence prints: KL in nats, top1 a share, *_error one standard error."""
    figures = {}
    for name, pattern in _LINES.items():
        found = re.search(rf"^{pattern}", output, re.MULTILINE)
        if found is None or not all(math.isfinite(float(value)) for value in found.groups() if value is not None):
            raise SystemExit(f"error: llama-perplexity said no {name}; its last words: {last_words(output)}")
        share = 100.0 if name == "top1" else 1.0
        figures[name] = float(found[1]) / share
        if found.re.groups == 2 and found[2] is not None:
            figures[f"{name}_error"] = float(found[2]) / share
    return figures


def parse_version(output: str) -> str:
    """Version from the output of `--version`: "build (commit)"."""
    found = re.search(r"^version: (.+)$", output, re.MULTILINE)
    return found[1].strip() if found else "unknown"


def last_words(output: str) -> str:
    """Last line of an output, for an error message."""
    return " | ".join(output.strip().splitlines()[-3:])[-400:] or "nothing"


def base_tokens(base: Path) -> tuple[int, list[int]]:
    """Context and tokens of all windows in a file of --kl-divergence-base."""
    with base.open("rb") as file:
        magic, head = file.read(8), np.fromfile(file, "<i4", 3)
        if magic != b"_logits_" or len(head) < 3:  # the only output for a text that is too short
            raise SystemExit(f"error: {base} is no file of --kl-divergence-base that has windows in it")
        context, _, count = (int(value) for value in head)
        return context, [int(token) for token in np.fromfile(file, "<i4", context * count)]


def bits_per_element(name: str) -> float:
    """Bits per element of a format of llama.cpp, from GGUF's table of block sizes."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    return float(8 * size / elements)


@dataclass(frozen=True)
class Program:
    """llama-perplexity on one model and one file of predictions."""

    path: Path
    model: Path
    base: Path
    context: int
    windows: int
    threads: int

    def run(self, *arguments: str, rotation: bool = True) -> str:
        environment = {name: value for name, value in os.environ.items() if name != ROTATION_OFF}
        if not rotation:
            environment[ROTATION_OFF] = "1"
        done = subprocess.run(
            [self.path, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"error: {self.path.name} ended with {done.returncode}: {last_words(done.stdout)}")
        return done.stdout

    def _common(self, cache: str) -> list[str]:
        sizes = ["-c", str(self.context), "--chunks", str(self.windows), "-t", str(self.threads)]
        # Quantized V requires flash attention, so the reference uses it, too.
        return ["-m", str(self.model), *sizes, "-fa", "on", "-ctk", cache, "-ctv", cache]

    def keep_reference(self, text: Path) -> None:
        """Writes the predictions with the exact cache to `base`."""
        self.run(*self._common(REFERENCE), "-f", str(text), "--no-escape", "--kl-divergence-base", str(self.base))

    def compare(self, cache: str, rotation: bool = True) -> dict[str, float]:
        """Divergence of the predictions with that cache from `base`."""
        words = ("--kl-divergence", "--kl-divergence-base", str(self.base))
        return parse_figures(self.run(*self._common(cache), *words, rotation=rotation))


def check_windows(base: Path, passages: Sequence[Passage]) -> None:
    """Checks that llama.cpp read the tokens of Kvanta's windows."""
    context, tokens = base_tokens(base)
    own = [token for passage in passages for token in passage.tokens]
    if tokens != own or any(len(passage.tokens) != context for passage in passages):
        equal = next((i for i, pair in enumerate(zip(tokens, own, strict=False)) if pair[0] != pair[1]), len(own))
        raise SystemExit(
            f"error: llama.cpp reads {len(tokens)} tokens, Kvanta {len(own)}, and they differ from token {equal} on; "
            "models that begin with a special token are cut into other windows"
        )


def measure(program: Program, names: Sequence[str]) -> list[dict[str, Any]]:
    """One row per format; two if the program rotates K and V by default."""
    rows = []
    for name in names:
        by_rotation = {rotation: program.compare(name, rotation) for rotation in (True, False)}
        switched = by_rotation[True] != by_rotation[False]
        for rotation in (True, False) if switched else (False,):
            row = {"format": name, "rotated": rotation, "bits_per_element": bits_per_element(name)}
            rows.append({**row, **by_rotation[rotation]})
            kl = by_rotation[rotation]["kl_mean"]
            print(f"{name:7} {'rotated' if rotation else 'as it is':8} mean KL {kl:.6f}", flush=True)
    return rows


def kvanta_window_bits(folder: Path, context: int, schemes: Iterable[str]) -> dict[str, float]:
    """Bits per element of a sequence of `context` tokens, exact pages included.

    For every format that the model supports, and for `schemes`.
    """
    rows = plan(str(folder), context=context)["formats"]
    names = {row["name"] for row in rows}
    others = [name for name in schemes if name not in names and not is_scheme_file(name)]
    rows += plan(str(folder), formats=others, context=context)["formats"] if others else []
    elements = [row["bytes_per_token"] * 8 / row["bits_per_element"] * context for row in rows]
    return {row["name"]: row["sequence_bytes"] * 8 / n for row, n in zip(rows, elements, strict=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-perplexity", type=Path, required=True, help="path of llama-perplexity")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--eval", type=Path, default=ROOT / "docs" / "results" / "eval.json", help="Kvanta's results")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    folder = resolve_model(options.model).path
    tokenizer = Tokenizer(folder)
    text = read_text(options.text)
    tokens = tokenize(text, tokenizer, options.tokens)
    passages = windows(tokens, beginning_of(tokenizer), options.context)
    with tempfile.TemporaryDirectory() as work:
        place = Path(work)
        model, base, same_text = place / "model.gguf", place / "reference.bin", place / "text"
        write_exact_gguf(folder, model)
        program = Program(
            options.llama_perplexity.resolve(), model, base, options.context, len(passages), options.threads
        )
        version = parse_version(program.run("--version"))
        same_text.write_text(text, encoding="utf-8", newline="")  # the text as Kvanta reads it: "\r\n" becomes "\n"
        program.keep_reference(same_text)
        check_windows(base, passages)
        control = program.compare(CONTROL)
        rows = measure(program, options.formats)

    own = json.loads(options.eval.read_text(encoding="utf-8")) if options.eval.is_file() else {"formats": {}}
    report = {
        "model": options.model,
        "text": options.text.name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": sum(len(passage.tokens) for passage in passages),
        "context": options.context,
        "windows": len(passages),
        # llama.cpp leaves out the first row of each second half.
        "scored_tokens": sum(passage.rows - 1 for passage in passages),
        "version": version,
        "reference": REFERENCE,
        "control": {"format": CONTROL, **control},
        "kvanta_window_bits": kvanta_window_bits(folder, options.context, own["formats"]),
        "rows": rows,
    }
    print_verdicts(report, own)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def print_verdicts(report: dict[str, Any], own: dict[str, Any]) -> None:
    """Prints each format of llama.cpp with Kvanta's best format of at most as many bits."""
    if not measured_alike(report, own):
        print("Kvanta's figures are of another model, text or context: no comparison")
        return
    for row in compare(report, own):
        line = f"{row['label']:22} mean KL {row['kl_mean']:.6f}"
        for key, size in (("by_pages", "pages"), ("by_window", "pages and exact pages")):
            if key in row:
                best = row[key]
                line += f"; by {size}: {best['label']} {best['kl_mean']:.6f}, {best['times']:.1f} times less"
        print(line)


if __name__ == "__main__":
    sys.exit(main())
