"""Accuracy of +query at positions beyond those of its calibration.

    python benchmarks/query_positions.py smollm2 --text wiki.test.raw --contexts 2048 8192 \
        --formats int4 int4+query --json docs/results/query-positions.json

Matrices of "all positions" are what the model gets when it is loaded; those of "the text's positions" are made from
keys and queries where RoPE put them, as before ADR 0061. Figures are those of `kvanta eval --context N`: mean KL(bf16
cache || other) in nats per token over the second halves of windows. With --json, rows that the file has of the same
model, text, contexts and version are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from reports import earlier_rows

import kvanta
from kvanta.calibration import write_scale_file
from kvanta.calibration.automatic import WINDOW
from kvanta.calibration.calibrate import calibrate_query
from kvanta.calibration.default_text import mix_tokens
from kvanta.checkpoint.resolve import resolve_model
from kvanta.evaluate import Settings, evaluate

CALIBRATIONS: dict[str, list[int] | None] = {"all positions": None, "the text's positions": []}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True, metavar="FILE")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192], metavar="N")
    parser.add_argument("--formats", nargs="+", default=["int4", "int4+query"])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    report: dict[str, Any] = {
        "model": options.model,
        "text": Path(options.text).name,
        "tokens": options.tokens,
        "contexts": options.contexts,
        "version": kvanta.__version__,
    }
    report["rows"] = earlier_rows(options.json, report)
    reader = kvanta.LLM(str(resolve_model(options.model).path), kv_cache_dtype="bf16", max_model_len=WINDOW)
    with tempfile.TemporaryDirectory() as work:
        for calibration, lengths in {**CALIBRATIONS, "": None}.items():
            formats = [name for name in options.formats if ("query" in name or "klt" in name) == bool(calibration)]
            done = {row["format"] for row in report["rows"] if row["calibration"] == (calibration or "none")}
            if not set(formats) - done:
                continue
            engine = {}
            if calibration:
                file = Path(work) / f"{len(calibration)}.safetensors"
                found = calibrate_query(reader, mix_tokens(reader.tokenizer), WINDOW, lengths=lengths)
                write_scale_file(file, found, reader.model_info)
                engine = {"quantization_param_path": str(file)}
            for name in formats:
                if name in done:
                    continue
                row: dict[str, Any] = {"format": name, "calibration": calibration or "none", "kl_mean": {}}
                for context in options.contexts:
                    settings = Settings([name], options.text, context, options.tokens, engine=engine)
                    result = evaluate(options.model, settings)
                    row["kl_mean"][str(context)] = result["formats"][name]["kl_mean"]
                report["rows"].append(row)
                print(row, flush=True)
                if options.json:
                    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
