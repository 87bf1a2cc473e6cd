"""Effect of 8- and 4-bit weights, and of the 8-bit activations they are multiplied by, on a model's predictions.

    python benchmarks/weights.py SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.raw --json docs/results/weights.json

Each weight_dtype compared with bf16 weights, both with the bf16 cache: mean KL divergence in nats per token,
teacher-forced over windows from the start of the text, the second half of each scored. Of a GGUF file whose blocks are
kept, both have the same weights, and the divergence is that of rounding activations; of the folder that the file is
converted to, the bf16 weights are quantized when they are loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import kvanta
from kvanta.checkpoint.resolve import resolve_model
from kvanta.evaluate import Settings, evaluate
from kvanta.gguf.convert import convert_gguf

KEYS = ("kl_mean", "kl_mean_ci95", "kl_median", "kl_p99", "kl_max", "top1", "ppl_ratio")


def weight_bytes(folder: Path, weight_dtype: str) -> int:
    llm = kvanta.LLM(folder, weight_dtype=weight_dtype, max_model_len=64, max_num_seqs=1)
    return int(llm.stats()["weight_bytes"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    folder = resolve_model(options.model).path
    report: dict[str, Any] = {"model": options.model, "text": Path(options.text).name, "rows": []}
    with tempfile.TemporaryDirectory() as work:
        if Path(options.model).suffix == ".gguf":
            converted = convert_gguf(options.model, Path(work) / "model")
            sources = [(folder, "blocks of the GGUF file"), (converted, "quantized when loaded")]
        else:
            sources = [(folder, "quantized when loaded")]
        for source, origin in sources:
            for weight_dtype in ("int8", "int4"):
                settings = Settings(
                    formats=["bf16"],
                    text=options.text,
                    tokens=options.tokens,
                    context=options.context,
                    reference_weights="bf16",
                    engine={"weight_dtype": weight_dtype},
                )
                result = evaluate(str(source), settings)
                figures = result["formats"]["bf16"]
                row = {"weights": weight_dtype, "from": origin, "weight_bytes": weight_bytes(source, weight_dtype)}
                row["bf16_weight_bytes"] = weight_bytes(source, "bf16")
                report["rows"].append({**row, **{key: figures[key] for key in KEYS}})
                report |= {key: result[key] for key in ("context", "tokens", "scored_tokens", "text_sha256")}
                print(f"{weight_dtype} ({origin}): mean KL {figures['kl_mean']:.6f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
