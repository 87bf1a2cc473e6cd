"""Measuring of other engines' kernels on a GPU: a timer, problems with float32 references, decode and prefill.

Every kernel is checked against a reference on a small problem before it is timed. Times are the median over RUNS runs
with CUDA events; a 512 MiB copy before each run evicts the L2 cache and hides the launch. KV bytes are those the format
stores (scales included); a share relates them to the bandwidth of that copy.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SHAPES = [(64, 8192), (1, 131072), (1000, 512)]  # batch x context
CHECK_SHAPE = (3, 1500)
RUNS = 12
PREFILL_TOKENS, PREFILL_DEPTHS = 2048, (0, 16384)
COPY_BYTES = 512 << 20
DEVICE = "cuda"


class Bench:
    """Timer, result table and failures."""

    def __init__(self, patterns: list[str], resume: str | None = None) -> None:
        self.patterns = patterns
        self.results: list[dict[str, Any]] = []
        self.failures: list[dict[str, str]] = []
        self.done: list[str] = []
        if resume:
            state = json.loads(Path(resume).read_text(encoding="utf-8"))
            self.results, self.failures, self.done = state["results"], state["failures"], state["done"]
        self.source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=DEVICE)
        self.target = torch.zeros_like(self.source)
        for _ in range(3):
            self.flush()
        times = self.time_runs(self.flush, flush=False, runs=20)
        self.copy_gb_s = 2 * COPY_BYTES / statistics.median(times) / 1e3
        print(f"copy of 512 MiB: {self.copy_gb_s:.0f} GB/s (read + written)", flush=True)

    def flush(self) -> None:
        self.target.copy_(self.source)

    def time_runs(self, run: Callable[[], Any], flush: bool = True, runs: int = RUNS) -> list[float]:
        """Microseconds of each run. The flush also covers the host's time to launch, which must not be measured."""
        flushes = 0
        if flush:
            begin = time.perf_counter()
            run()
            host_us = (time.perf_counter() - begin) * 1e6
            flushes = 1 + min(20, int(1.5 * host_us / (2 * COPY_BYTES / self.copy_gb_s / 1e3)))
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
        torch.cuda.synchronize()
        for start, end in events:
            for _ in range(flushes):
                self.flush()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]

    def selected(self, name: str) -> bool:
        return not self.patterns or any(pattern in name for pattern in self.patterns)

    def guard(self, name: str, action: Callable[[], None]) -> None:
        """Runs one peer; an error is printed and recorded, and the next peer follows. The exit status is 1 then."""
        if not self.selected(name) or name in self.done:
            return
        self.done.append(name)
        try:
            action()
        except Exception as error:
            lines = [line for line in traceback.format_exc().strip().splitlines() if line.strip()]
            self.failures.append({"peer": name, "error": "\n".join(lines[-6:])})
            print(f"{name:38s} FAILED: {type(error).__name__}")
            print("    " + "\n    ".join(line[:300] for line in lines[-4:]), flush=True)
            try:
                torch.cuda.synchronize()
            except Exception:
                self.restart()
        torch.cuda.empty_cache()

    def restart(self) -> None:
        """Continues with the next peer in a new process, after an error that made the CUDA context unusable."""
        print("CUDA context lost: restarting for the remaining peers", flush=True)
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            json.dump({"done": self.done, "results": self.results, "failures": self.failures}, file)
        arguments = [a for i, a in enumerate(sys.argv) if a != "--resume" and sys.argv[i - 1] != "--resume"]
        raise SystemExit(subprocess.run([sys.executable, *arguments, "--resume", file.name], check=False).returncode)

    def add(
        self,
        peer: str,
        case: str,
        times: list[float],
        error: float | None = None,
        kv_bytes: int = 0,
        weight_bytes: int = 0,
        flops: float = 0,
        **extra: Any,
    ) -> None:
        median = statistics.median(times)
        row: dict[str, Any] = {
            "peer": peer,
            "case": case,
            "us": round(median, 2),
            "us_min": round(min(times), 2),
            "us_max": round(max(times), 2),
            "runs": len(times),
            **extra,
        }
        text = f"{peer:38s} {case:22s} {median:10.1f} us"
        stored = kv_bytes or weight_bytes
        if stored:
            row["bytes"], row["gb_s"] = stored, round(stored / median / 1e3, 1)
            row["copy_share"] = round(row["gb_s"] / self.copy_gb_s, 4)
            text += f" {row['gb_s']:8.0f} GB/s {100 * row['copy_share']:5.1f}% of copy"
        if flops:
            row["tflops"] = round(flops / median / 1e6, 2)
            text += f" {row['tflops']:7.1f} TFLOP/s"
        if error is not None:
            row["error"] = error
            text += f"  err {error:.1e}"
        for key, value in extra.items():
            text += f" {key}={value}"
        self.results.append(row)
        print(text, flush=True)

    def finish(self, path: str | None) -> int:
        if path:
            report = {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "copy_gb_s": round(self.copy_gb_s, 1),
                "results": self.results,
                "failures": self.failures,
            }
            Path(path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"{len(self.results)} measurements, {len(self.failures)} failed peers", flush=True)
        return 1 if self.failures else 0


@dataclasses.dataclass
class Problem:
    """A decode step: `run` returns [batch, heads, value dim]; `reference` computes it in float32."""

    run: Callable[[], torch.Tensor]
    reference: Callable[[], torch.Tensor]
    kv_bytes: int
    flops: float = 0


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of the expected values."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    difference = (actual.float() - expected).square().mean().sqrt()
    return float(difference / expected.square().mean().sqrt())


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Float32 decode attention: q [batch, heads, dim], k and v [batch, tokens, KV heads, dim]."""
    group = q.shape[1] // k.shape[2]
    q, k, v = q.float(), k.float().repeat_interleave(group, 2), v.float().repeat_interleave(group, 2)
    scores = torch.einsum("bhd,bthd->bht", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    return torch.einsum("bht,bthd->bhd", scores.softmax(-1), v)


def attend_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Float32 causal attention aligned at the end: q [tokens, heads, dim], k and v [all tokens, KV heads, dim]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.float(), k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,thd->hqt", q, k) / math.sqrt(q.shape[-1])
    mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).tril(k.shape[0] - q.shape[0])
    return torch.einsum("hqt,thd->qhd", scores.masked_fill(~mask, -math.inf).softmax(-1), v)


def decode(bench: Bench, name: str, make: Callable[[], Callable[[int, int], Problem]], tolerance: float) -> None:
    """Checks and times one decode kernel on every shape; `make()` returns build(batch, context)."""

    def action() -> None:
        build = make()
        small = build(*CHECK_SHAPE)
        error = relative_error(small.run(), small.reference())
        if not error < tolerance:
            raise AssertionError(f"relative error {error:.3g} exceeds {tolerance:g}")
        del small
        for batch, context in SHAPES:
            problem = build(batch, context)
            for _ in range(3):
                problem.run()
            bench.add(
                name,
                f"{batch} x {context}",
                bench.time_runs(problem.run),
                error,
                kv_bytes=problem.kv_bytes,
                flops=problem.flops,
            )
            del problem
            torch.cuda.empty_cache()

    bench.guard(name, action)


def prefill_flops(depth: int) -> float:
    pairs = PREFILL_TOKENS * depth + PREFILL_TOKENS * (PREFILL_TOKENS + 1) / 2
    return 4 * HEADS * HEAD_DIM * pairs


def prefill(
    bench: Bench,
    name: str,
    make: Callable[[], Callable[[int, int], Problem]],
    tolerance: float,
    depths: tuple[int, ...] = PREFILL_DEPTHS,
) -> None:
    """Checks and times one prefill kernel; `make()` returns build(tokens, depth)."""

    def action() -> None:
        build = make()
        for depth in depths:
            small = build(200, 300 if depth else 0)
            error = relative_error(small.run(), small.reference())
            if not error < tolerance:
                raise AssertionError(f"relative error {error:.3g} exceeds {tolerance:g} (depth {depth})")
            problem = build(PREFILL_TOKENS, depth)
            for _ in range(3):
                problem.run()
            bench.add(
                name,
                f"{PREFILL_TOKENS} at depth {depth}",
                bench.time_runs(problem.run),
                error,
                flops=prefill_flops(depth),
            )
            del small, problem

    bench.guard(name, action)
