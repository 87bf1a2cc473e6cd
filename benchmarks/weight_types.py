"""Error of the 8-bit activations that GGUF's blocks are multiplied by: Kvanta and llama.cpp, per type of block.

    python benchmarks/weight_types.py SmolLM2-135M-Instruct.Q4_1.gguf --llama-bin FOLDER --text wiki.test.raw \
        --json docs/results/weight-types.json

FOLDER has llama.cpp's llama-quantize and llama-perplexity, built elsewhere. SmolLM2 is widened without another result,
so that its rows have whole blocks of 256 (benchmarks/wide_gguf.py), and quantized to each type, matrix of the logits
included. Both programs compare predictions from that file with predictions from its weights dequantized to bf16, on
the same windows of tokens: mean KL divergence in nats per token, the second half of each window scored, the cache
unquantized (bf16; llama.cpp: f16). Results of an earlier run with the same model, text and program stay in FILE, so
types can be measured one by one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from reports import earlier_rows

sys.path.insert(0, str(Path(__file__).resolve().parent))

from llama_cpp import Program, check_windows, last_words, parse_version
from wide_gguf import write_bf16, write_wide

from kvanta.checkpoint.resolve import resolve_model
from kvanta.evaluate import Settings, evaluate
from kvanta.evaluate.passages import beginning_of, read_text, tokenize, windows
from kvanta.text.tokenizer import Tokenizer

# Names of the types for llama-quantize.
TYPES = {
    name: name for name in ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL")
} | {"IQ4_XS": "IQ4_XS", "MXFP4": "MXFP4_MOE"}
BAR = 0.002  # largest mean KL divergence
_KEYS = ("kl_mean", "kl_median", "kl_p99", "kl_max", "top1", "ppl_ratio")


def quantize(program: Path, source: Path, target: Path, kind: str) -> None:
    """Writes the file with every matrix in the type; raises SystemExit if llama-quantize fails or takes another one."""
    done = subprocess.run(
        [program, "--pure", source, target, TYPES[kind]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"error: {program.name} ended with {done.returncode}: {last_words(done.stdout)}")
    types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(target).tensors if len(tensor.shape) > 1}
    if types != {kind}:
        raise SystemExit(f"error: {program.name} wrote matrices in {', '.join(sorted(types))}, not in {kind}")


def own_figures(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Kvanta's divergence of the blocks from their weights in bf16."""
    settings = Settings(
        formats=["bf16"],
        text=str(options.text),
        tokens=options.tokens,
        context=options.context,
        reference_weights="bf16",
        engine={"threads": options.threads},
    )
    figures: Mapping[str, Any] = evaluate(str(model), settings)["formats"]["bf16"]
    return {key: figures[key] for key in _KEYS}


def measure(kind: str, wide: Path, place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One row: both programs on the model in that type."""
    model, exact, base = place / f"{kind}.gguf", place / "exact.gguf", place / "base.bin"
    quantize(options.llama_bin / "llama-quantize", wide, model, kind)
    write_bf16(model, exact)
    tokenizer = Tokenizer(resolve_model(str(model)).path)
    text = read_text(options.text)
    passages = windows(tokenize(text, tokenizer, options.tokens), beginning_of(tokenizer), options.context)
    same_text = place / "text"
    same_text.write_text(text, encoding="utf-8", newline="")  # the text as Kvanta reads it: "\r\n" becomes "\n"
    perplexity = (options.llama_bin / "llama-perplexity").resolve()
    common = (base, options.context, len(passages), options.threads)
    Program(perplexity, exact, *common).keep_reference(same_text)
    check_windows(base, passages)
    theirs = Program(perplexity, model, *common).compare("f16")
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    own = own_figures(model, options)
    model.unlink()
    return {
        "type": kind,
        "bits": 8 * size / weights,
        "kvanta": own,
        "llama_cpp": {key: theirs[key] for key in _KEYS},
        "scored_tokens": sum(passage.rows for passage in passages),
        "times": theirs["kl_mean"] / own["kl_mean"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--llama-bin", type=Path, required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--types", nargs="+", default=[*TYPES], choices=TYPES, metavar="TYPE")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    report: dict[str, Any] = {
        "model": options.gguf.name,
        "text": options.text.name,
        "text_sha256": hashlib.sha256(read_text(options.text).encode()).hexdigest(),
        "tokens": options.tokens,
        "context": options.context,
        "bar": BAR,
    }
    with tempfile.TemporaryDirectory() as work:
        place = Path(work)
        os.environ["KVANTA_HOME"] = work  # folders of files that are deleted
        wide = place / "wide.gguf"
        write_wide(options.gguf, wide)
        program = (options.llama_bin / "llama-perplexity").resolve()
        report["version"] = parse_version(Program(program, wide, place, 0, 0, 1).run("--version"))
        rows = {row["type"]: row for row in earlier_rows(options.json, report)}
        for kind in options.types:
            rows[kind] = measure(kind, wide, place, options)
            own, other = (rows[kind][name]["kl_mean"] for name in ("kvanta", "llama_cpp"))
            print(
                f"{kind:6} {own:.6f}, llama.cpp {other:.6f}{'' if own <= min(BAR, other) else ': MISSED'}", flush=True
            )
            if options.json:
                ordered = [rows[name] for name in TYPES if name in rows]
                options.json.write_text(json.dumps({**report, "rows": ordered}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
