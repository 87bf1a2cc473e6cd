"""Accuracy of +query on texts that its calibration did not see, and of calibrations on other texts or lengths.

    python benchmarks/query_transfer.py smollm2 --texts wiki=wiki.test.raw code=shutil.py zh=apt.mo \
        --calibrations mix wiki:8192 mix:2048 --formats int4 int4+query klt3 --tokens 4096 --json FILE

A calibration is a text's name and, after a colon, its number of tokens (8,192); `mix` is the text that comes with
Kvanta. Of every text the last `--tokens` are compared, in windows of 2,048 whose second halves count, and the first
ones calibrate: no token does both. Files ending in .mo are message catalogs, of which the translations are read.
Formats without +query have one figure. KL(bf16 cache || other) in nats per token. With --json, rows that the file has
already are kept.
"""

from __future__ import annotations

import argparse
import gettext
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvanta
from kvanta.calibration import query_matrices, write_scale_file
from kvanta.calibration.calibrate import calibrate_query
from kvanta.calibration.default_text import TEXT as MIX
from kvanta.checkpoint.resolve import resolve_model
from kvanta.evaluate.divergence import kl_divergence

WINDOW = 2048
DEFAULT_TOKENS = 8192
Logits = npt.NDArray[np.float32]


def read_text(path: Path) -> str:
    if path.suffix != ".mo":
        return path.read_text(encoding="utf-8")
    with path.open("rb") as file:
        catalog = gettext.GNUTranslations(file)
    return "\n".join(message for message in catalog._catalog.values() if message)  # type: ignore[attr-defined]


def windows_of(tokens: list[int], count: int, window: int) -> list[list[int]]:
    """The last `count` tokens in windows."""
    last = tokens[-count:]
    return [last[begin : begin + window] for begin in range(0, len(last) - window + 1, window)]


def mean_divergence(exact: list[Logits], llm: kvanta.LLM, windows: list[list[int]]) -> float:
    parts = [
        kl_divergence(reference, llm.logits(window)[len(window) // 2 :])
        for reference, window in zip(exact, windows, strict=True)
    ]
    return float(np.concatenate(parts).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--texts", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--calibrations", nargs="+", default=["mix"], metavar="NAME[:TOKENS]")
    parser.add_argument("--formats", nargs="+", default=["int4", "int4+query"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    folder = str(resolve_model(options.model).path)
    length = min(WINDOW, int(kvanta._core.read_model_info(folder).max_position))
    report: dict[str, Any] = {"model": options.model, "tokens": options.tokens, "window": length, "rows": []}
    if options.json and options.json.is_file():
        report = json.loads(options.json.read_text(encoding="utf-8"))
        if (report["model"], report["tokens"]) != (options.model, options.tokens):
            print(f"error: {options.json} is of another model or number of tokens", file=sys.stderr)
            return 1
    found = {(row["text"], row["calibration"], row["format"]): row["kl_mean"] for row in report["rows"]}

    reader = kvanta.LLM(folder, kv_cache_dtype="bf16", max_model_len=length)
    texts = {
        name: reader.tokenizer.encode(read_text(Path(file)))
        for name, file in (entry.split("=", 1) for entry in options.texts)
    }
    tokens_of = {"mix": reader.tokenizer.encode(MIX.read_text(encoding="utf-8"))} | texts
    query_matrices.MIN_TOKENS = 1  # shorter texts are part of the question
    windows = {name: windows_of(tokens, options.tokens, length) for name, tokens in texts.items()}
    with tempfile.TemporaryDirectory() as work:
        files = {}
        for calibration in options.calibrations:
            name, _, count = calibration.partition(":")
            source = tokens_of[name] if name == "mix" else tokens_of[name][: -options.tokens]
            wanted = int(count or DEFAULT_TOKENS)
            if name == "mix":
                source = source * (wanted // len(source) + 1)
            if len(source) < wanted:
                print(f"error: {calibration}: {name} has {len(source):,} tokens that are not compared", file=sys.stderr)
                return 1
            files[calibration] = Path(work) / f"{calibration}.safetensors"
            write_scale_file(files[calibration], calibrate_query(reader, source[:wanted], length), reader.model_info)
        for text, parts in windows.items():
            exact = [reader.logits(window)[length // 2 :] for window in parts]
            for format_ in options.formats:
                has_query = "query" in format_ or "klt" in format_
                for calibration in options.calibrations if has_query else [""]:
                    if (text, calibration, format_) in found:
                        continue
                    path = str(files[calibration]) if calibration else ""
                    llm = kvanta.LLM(folder, kv_cache_dtype=format_, max_model_len=length, quantization_param_path=path)
                    kl_mean = mean_divergence(exact, llm, parts)
                    report["rows"].append(
                        {"text": text, "calibration": calibration, "format": format_, "kl_mean": kl_mean}
                    )
                    print(f"{text:12} {calibration or '-':12} {format_:16} mean KL {kl_mean:.5f}", flush=True)
                    if options.json:
                        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
