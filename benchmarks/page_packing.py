"""Lossless packing of stored pages by zstd, per cache format: bytes saved, and speed relative to reading pages.

    python benchmarks/page_packing.py smollm2 --text wiki.test.raw --json docs/results/page-packing.json

Pages of a text are written to a prefix cache on disk and read back by another engine, which must generate the same
tokens and gives the rate of reading with its checks (from the system's file cache). `zstd -b` of the program zstd packs
and unpacks the same files in blocks of one record. `entropy`: the share of bytes that an ideal order-0 coder would
leave, at any speed: the better one of bytes and 4-bit codes. `halves`: low and high bytes of 16-bit values apart.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta import _core
from kvanta.checkpoint.resolve import resolve_model
from kvanta.engine.config import engine_config
from kvanta.text.tokenizer import Tokenizer

FORMATS = ("bf16", "fp8", "int8", "int4", "t3", "nvfp4")
LEVELS = (1, 3)
OUTPUT_TOKENS = 8
_LINE = re.compile(r"->\s*(\d+).*?,\s*([\d.]+) MB/s,?\s*([\d.]+) MB/s")


def write_pages(options: argparse.Namespace, name: str, prompt: list[int], folder: Path) -> dict[str, Any]:
    """Statistics of the disk after writing the prompt's pages and reading them in another engine."""
    arguments = {
        "kv_cache_dtype": name,
        "max_model_len": len(prompt) + OUTPUT_TOKENS + 1,
        "max_num_seqs": 1,
        "kv_cache_dir": str(folder),
    }
    stats: dict[str, Any] = {}
    found: list[list[int]] = []
    for _ in range(2):
        engine = _core.Engine(engine_config(options.folder, arguments))
        sampling = _core.SamplingParams()
        sampling.max_tokens, sampling.ignore_eos, sampling.temperature = OUTPUT_TOKENS, True, 0.0
        engine.add("text", prompt, sampling)
        found.append([])
        while (outputs := engine.step()) is not None:
            for each in outputs:
                if each.error:
                    raise SystemExit(f"error: {each.error}")
                found[-1] += each.tokens
        engine.flush_prefix_cache()
        stats = engine.stats()["disk"]
        del engine
    if not stats["read_bytes"] or found[1] != found[0]:
        raise SystemExit(f"error: {name}: {found[1]} after {stats['read_bytes']} bytes of pages, {found[0]} computed")
    return stats


def zstd(file: Path, level: int, block: int, seconds: int) -> dict[str, float]:
    """Share of the bytes that stay, and GB/s of unpacked bytes."""
    command = ["zstd", f"-b{level}", f"-i{seconds}", f"-B{block}", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = _LINE.findall(done.stdout + done.stderr)
    if not found:
        raise SystemExit(f"error: zstd says nothing: {done.stdout[-200:]} {done.stderr[-200:]}")
    size, pack, unpack = found[-1]
    return {
        "left": int(size) / file.stat().st_size,
        "pack_gb_s": float(pack) / 1e3,
        "unpack_gb_s": float(unpack) / 1e3,
    }


def entropy(values: NDArray[np.uint8], bits: int) -> float:
    """Bits per bit of values of `bits` bits, each by itself."""
    counts = np.bincount(values, minlength=2**bits)
    shares = counts[counts > 0] / values.size
    return float(-(shares * np.log2(shares)).sum()) / bits


def measure(options: argparse.Namespace, name: str, prompt: list[int]) -> dict[str, Any]:
    """One row of the report."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "pages"
        disk = write_pages(options, name, prompt, folder)
        files = sorted(path for path in folder.rglob("*-*") if path.is_file())
        pages = np.frombuffer(b"".join(path.read_bytes() for path in files), dtype=np.uint8)
        block = max(path.stat().st_size for path in files)
        whole = Path(parent) / "whole"
        whole.write_bytes(pages.tobytes())
        row: dict[str, Any] = {
            "format": name,
            "record_bytes": block,
            "read_gb_s": disk["read_bytes"] / disk["read_seconds"] / 1e9,
            "zstd": {str(level): zstd(whole, level, block, options.seconds) for level in LEVELS},
        }
        nibbles = np.concatenate([pages & 15, pages >> 4])
        row["entropy"] = min(entropy(pages, 8), entropy(nibbles, 4))
        if name == "bf16":
            even = pages[: pages.size // 2 * 2]
            whole.write_bytes(even[0::2].tobytes() + even[1::2].tobytes())
            row["halves"] = zstd(whole, LEVELS[0], block // 2, options.seconds)
            row["entropy"] = (entropy(even[0::2], 8) + entropy(even[1::2], 8)) / 2
    left = row["zstd"][str(LEVELS[0])]
    print(
        f"{name:8} zstd -1 leaves {left['left']:.1%}, unpacks {left['unpack_gb_s']:.2f} GB/s; "
        f"an ideal coder {row['entropy']:.1%}; pages are read at {row['read_gb_s']:.2f} GB/s",
        flush=True,
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2049)
    parser.add_argument("--seconds", type=int, default=1, help="of each measurement of zstd")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.folder = str(resolve_model(options.model).path)
    text = options.text.read_text(encoding="utf-8")[: 16 * options.tokens]
    prompt = Tokenizer(options.folder).encode(text)[: options.tokens]
    report = {
        "model": options.model,
        "tokens": len(prompt),
        "rows": [measure(options, name, prompt) for name in options.formats],
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
