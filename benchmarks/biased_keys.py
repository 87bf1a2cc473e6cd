"""Cache formats on keys with a large bias: KL divergence of a model's twins from the model on its own bf16 cache.

    python benchmarks/biased_keys.py smollm2 --text wiki.test.raw --json docs/results/biased-keys.json

The twins are equivalent to the base model (tests/python/biased_twins.py), which is verified first, in float32. Scales,
key means, outlier channels and matrices of +query are calibrated per twin on the shipped text. Windows of --context
tokens from the start of the text; the second half of each is scored, teacher-forced, in nats per token.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))

import biased_twins

from kvanta import LLM
from kvanta.calibration import calibrate, write_scale_file
from kvanta.checkpoint.resolve import resolve_model
from kvanta.evaluate.divergence import kl_divergence
from kvanta.evaluate.passages import SHIPPED_TEXT

PAIRS, BIAS = 3, 64.0
OUTLIER_PAIRS, OUTLIER_FACTOR = 2, 32.0
# Without remedy, with the Hadamard transform, and with the options for biased keys.
FORMATS = (
    "int4-hadamard",
    "int4",
    "int4+mean",
    "int4+query",
    "int4+outliers=4",
    "int4+mean+outliers=4",
    "kivi4",
    "int8",
    "int8+mean",
)


def without_remedy(name: str) -> str:
    """The format that it is compared with: the base model needs no remedy."""
    return re.split(r"\+(?:mean|query|outliers)", name, maxsplit=1)[0]


class Reader:
    """Logits of a twin's scored rows with one cache format."""

    def __init__(self, tokens: list[int], context: int) -> None:
        self.windows = [tokens[begin : begin + context] for begin in range(0, len(tokens), context)]
        self.context = context

    def logits(self, folder: Path, name: str, scales: Path | None = None, **options: Any) -> NDArray[np.float32]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the scale file has entries that this format does not use
            path = "" if scales is None else str(scales)
            llm = LLM(
                folder,
                kv_cache_dtype=name,
                quantization_param_path=path,
                max_model_len=self.context,
                max_num_seqs=1,
                **options,
            )
        return np.concatenate([llm.logits(window)[self.context // 2 :] for window in self.windows])


def calibrated(folder: Path, file: Path) -> Path:
    llm = LLM(folder, kv_cache_dtype="bf16", max_model_len=2048, max_num_seqs=1)
    tokens = llm.tokenizer.encode(SHIPPED_TEXT.read_text(encoding="utf-8"))
    found = calibrate(llm, tokens, granularity="head", key_mean=True, outliers=2 * OUTLIER_PAIRS, query=True)
    write_scale_file(file, found, llm.model_info)
    return file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for index, name in enumerate(options.formats):
        if without_remedy(name) not in options.formats[: index + 1]:
            parser.error(f"--formats needs {without_remedy(name)} before {name}, which is compared with it")

    rows = []
    with tempfile.TemporaryDirectory() as work:
        place = Path(work)
        base = biased_twins.still_pairs(resolve_model(options.model).path, place / "base", PAIRS)
        twins = {
            "as they are": base,
            f"biased by ±{BIAS:g}": biased_twins.biased_keys(base, place / "biased", PAIRS, BIAS),
            f"outliers of {OUTLIER_FACTOR:g}x": biased_twins.outlier_channels(
                base, place / "outliers", OUTLIER_PAIRS, OUTLIER_FACTOR
            ),
        }
        tokenizer = LLM(base, max_model_len=options.context, max_num_seqs=1).tokenizer
        tokens = tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.tokens]
        first = Reader(tokens[: options.context], options.context)
        exact = first.logits(base, "fp32", dtype="float32")
        changed = {}
        for keys, folder in twins.items():
            divergence = kl_divergence(exact, first.logits(folder, "fp32", dtype="float32")).mean()
            changed[keys] = float(divergence)
            print(f"{keys:18} float32, exact cache: mean KL {divergence:.1e} to the base")
            if divergence > 1e-6:
                raise SystemExit(f"error: the twin with keys {keys} computes something else")

        reader = Reader(tokens, options.context)
        reference = reader.logits(base, "bf16")
        plain: dict[str, float] = {}
        for keys, folder in twins.items():
            scales = calibrated(folder, place / f"{folder.name}.safetensors")
            for name in options.formats:
                logits = reader.logits(folder, name, scales)
                kl = float(kl_divergence(reference, logits).mean())
                if folder is base:
                    plain[name] = kl
                without = without_remedy(name)
                top1 = float((reference.argmax(axis=-1) == logits.argmax(axis=-1)).mean())
                rows.append(
                    {"keys": keys, "format": name, "kl_mean": kl, "times_base": kl / plain[without], "top1": top1}
                )
                print(f"{keys:18} {name:16} mean KL {kl:.5f}  {kl / plain[without]:8.2f} x the base's  {top1:.1%}")
    report = {
        "model": options.model,
        "text": options.text.name,
        "tokens": len(tokens),
        "context": options.context,
        "float32_kl_to_base": changed,
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
