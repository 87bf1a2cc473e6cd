"""Linear layers with bf16 weights, Kvanta's and torch's (F.linear: oneDNN), in turns on the same machine.

    python benchmarks/linear_vs_torch.py --json docs/results/linear-torch.json

Results of both are compared with double precision before they are timed. Each turn times one library after the other,
without the other's threads spinning; figures are medians over turns, the ratio is the median of the turns' ratios. With
up to 16 rows, weights are read from memory. Torch's rows and results are bf16, Kvanta's f32, as its models have them.
Layers of an earlier run on the same machine stay in FILE, so layers can be measured one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import linear

from kvanta import _core
from kvanta.cli.machine import cpu_name

LAYERS = ("4096x4096", "4096x14336", "14336x4096", "2048x8192")
ROWS = (1, 16, 64, 256, 1024, 4096)
_STREAMED_ROWS, _COLD_BYTES = 16, 128 << 20  # as in bench/linear_bench.cc
_TORCH_TOLERANCE = 2**-7  # of the largest result: sums are rounded to bf16


class TorchLayer:
    """Copies of a layer that together exceed the caches."""

    def __init__(self, size_in: int, size_out: int) -> None:
        random = torch.Generator().manual_seed(1)
        weight = torch.rand(size_out, size_in, generator=random) * 2 - 1
        self._first = weight.bfloat16()
        copies = max(2, _COLD_BYTES // (2 * size_in * size_out))
        self._copies = [self._first, *(self._first.clone() for _ in range(copies - 1))]
        self._x = torch.empty(0)

    def verify(self, rows: int) -> None:
        """Makes random rows and compares some of their product with double precision."""
        random = torch.Generator().manual_seed(2)
        self._x = (torch.rand(rows, self._first.shape[1], generator=random) * 2 - 1).bfloat16()
        picked = slice(None, None, max(1, rows // 7))
        expected = self._x[picked].double() @ self._first[::61].double().T
        error = (linear(self._x, self._first)[picked, ::61].double() - expected).abs().max()
        if not error <= _TORCH_TOLERANCE * expected.abs().max():
            raise SystemExit(f"error: torch's product of {rows} rows differs from double precision by {error}")

    def time(self) -> float:
        """Nanoseconds of a product."""
        copies = self._copies if len(self._x) <= _STREAMED_ROWS else self._copies[:1]
        start = time.perf_counter()
        for copy in copies:
            linear(self._x, copy)
        return (time.perf_counter() - start) * 1e9 / len(copies)


def turn(time_product: Callable[[], float], seconds: float) -> float:
    """Median nanoseconds of a product, after one that is not counted."""
    time.sleep(0.02)  # until the other library's threads sleep
    time_product()
    end, times = time.perf_counter() + seconds, [time_product()]
    while time.perf_counter() < end:
        times.append(time_product())
    return median(times)


def measure(layer: str, options: argparse.Namespace, peak: float) -> list[dict[str, Any]]:
    """A row of the report for each number of rows."""
    size_in, size_out = map(int, layer.split("x"))
    own, other = (
        _core.LinearTimer("bf16", options.isa, options.threads, size_in, size_out),
        TorchLayer(size_in, size_out),
    )
    report = []
    for rows in options.rows:
        own.verify(rows)
        other.verify(rows)
        turns = [(turn(own.time, options.seconds), turn(other.time, options.seconds)) for _ in range(options.turns)]
        own_ns, torch_ns = (median(column) for column in zip(*turns, strict=True))
        row = {
            "layer": layer,
            "rows": rows,
            "ns": own_ns,
            "torch_ns": torch_ns,
            "times_torch": median(theirs / ours for ours, theirs in turns),
            "share_of_peak": 2 * rows * size_in * size_out / own_ns * 1e9 / peak,
            "torch_share_of_peak": 2 * rows * size_in * size_out / torch_ns * 1e9 / peak,
        }
        report.append(row)
        print(
            f"{layer} {rows:5} rows: {row['times_torch']:.2f} times torch's speed, "
            f"{row['share_of_peak']:.0%} of the peak (torch {row['torch_share_of_peak']:.0%})",
            flush=True,
        )
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", default=LAYERS, metavar="INxOUT")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each library in a turn [0.1]")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = {"cpu": cpu_name(), "system": platform.platform(), "threads": options.threads, "torch": torch.__version__}
    rows: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        earlier = json.loads(options.json.read_text(encoding="utf-8"))
        if earlier["machine"] == machine:
            rows = [row for row in earlier["rows"] if row["layer"] not in options.layers]
    read, peak = _core.linear_limits("bf16", options.isa, options.threads)
    with torch.inference_mode():
        for layer in options.layers:
            rows += measure(layer, options, peak)
    if options.json is not None:
        rows.sort(key=lambda row: (LAYERS.index(row["layer"]) if row["layer"] in LAYERS else len(LAYERS), row["rows"]))
        limits = {"read_bytes_per_second": read, "operations_per_second": peak}
        report = {"machine": machine, "limits": limits, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
