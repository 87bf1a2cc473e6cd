#!/usr/bin/env python3
"""Other engines' kernels on this machine's GPU: decode attention and prefill of PyTorch (flash, cuDNN) and FlashInfer,
linear layers of cuBLAS.

    gpu_peers.py [--json FILE] [--only NAME ...]

Needs torch with CUDA, and flashinfer-python for its kernels; a peer that is missing or fails is printed and left out.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from gpu_flashinfer import flashinfer
from gpu_peer_bench import (
    COPY_BYTES,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PREFILL_DEPTHS,
    Bench,
    Problem,
    attend,
    attend_causal,
    decode,
    normal,
    prefill,
    relative_error,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

GROUP = HEADS // KV_HEADS
LINEAR_SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]  # out x in
LINEAR_ROWS = [1, 16, 64, 512, 2048]


def sdpa_decode(backend: SDPBackend, grouped: bool) -> Callable[[int, int], Problem]:
    """SDPA on contiguous KV; `grouped` passes a group's query heads as rows of one KV head, which GQA allows."""

    def build(batch: int, context: int) -> Problem:
        q = normal(batch, HEADS, HEAD_DIM)
        k, v = (normal(batch, KV_HEADS, context, HEAD_DIM) for _ in range(2))

        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                if grouped:
                    out = scaled_dot_product_attention(q.view(batch, KV_HEADS, GROUP, HEAD_DIM), k, v)
                else:
                    out = scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)
            return out.reshape(batch, HEADS, HEAD_DIM)

        return Problem(run, lambda: attend(q, k.transpose(1, 2), v.transpose(1, 2)), 2 * k.numel() * 2)

    return build


def sdpa_prefill(backend: SDPBackend) -> Callable[[int, int], Problem]:
    def build(tokens: int, depth: int) -> Problem:
        q = normal(tokens, HEADS, HEAD_DIM)
        k, v = (normal(tokens + depth, KV_HEADS, HEAD_DIM) for _ in range(2))
        q4, k4, v4 = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))

        def run() -> torch.Tensor:
            if depth:  # aten's flash kernel aligns the causal mask at the end; SDPA's is_causal at the start
                out = torch.ops.aten._scaled_dot_product_flash_attention(q4, k4, v4, 0.0, True)[0]
            else:
                with sdpa_kernel(backend):
                    out = scaled_dot_product_attention(q4, k4, v4, is_causal=True, enable_gqa=True)
            return out.squeeze(0).transpose(0, 1)

        return Problem(run, lambda: attend_causal(q, k, v), 0)

    return build


def torch_attention(bench: Bench) -> None:
    for label, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        decode(bench, f"torch-sdpa-{label}", partial(sdpa_decode, backend, False), 0.01)
        decode(bench, f"torch-sdpa-{label} group-as-rows", partial(sdpa_decode, backend, True), 0.01)
        prefill(
            bench,
            f"torch-sdpa-{label}-prefill",
            partial(sdpa_prefill, backend),
            0.01,
            PREFILL_DEPTHS if label == "flash" else (0,),
        )


# ---- cuBLAS --------------------------------------------------------------------------------------------------------


def time_linear(bench: Bench, rows: int, weights: list[torch.Tensor], out_type: torch.dtype) -> list[float]:
    """Microseconds per product: one CUDA graph multiplies by every copy of the weights in turn."""
    x = normal(rows, weights[0].shape[1])

    def product(weight: torch.Tensor) -> torch.Tensor:
        if out_type == torch.bfloat16:
            return torch.mm(x, weight.t())
        return torch.mm(x, weight.t(), out_dtype=out_type)

    expected = x.float() @ weights[0].float().t()
    error = relative_error(product(weights[0]), expected)
    assert error < 0.01, f"relative error {error:.3g}"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(weight)
    for _ in range(2):
        graph.replay()
    return [t / len(weights) for t in bench.time_runs(graph.replay, flush=False, runs=10)]


def linear_shape(bench: Bench, outputs: int, inputs: int, out_type: torch.dtype, label: str) -> None:
    weight_bytes = outputs * inputs * 2
    weights = [normal(outputs, inputs) for _ in range(max(4, math.ceil(COPY_BYTES / weight_bytes)))]
    for rows in LINEAR_ROWS:
        timed: list[tuple[float, list[float], str]] = []
        for library in ("cublas", "cublaslt"):
            torch.backends.cuda.preferred_blas_library(library)
            times = time_linear(bench, rows, weights, out_type)
            timed.append((statistics.median(times), times, library))
        _, times, library = min(timed)
        bench.add(
            f"linear {outputs}x{inputs} -> {label}",
            f"{rows} rows",
            times,
            weight_bytes=weight_bytes,
            flops=2.0 * rows * outputs * inputs,
            library=library,
        )


def linear(bench: Bench) -> None:
    """The faster of cuBLAS and cuBLASLt, as torch calls them, on weights that L2 does not hold."""
    for outputs, inputs in LINEAR_SHAPES:
        for out_type, label in ((torch.bfloat16, "bf16"), (torch.float32, "f32")):
            bench.guard(
                f"linear {outputs}x{inputs} -> {label}", partial(linear_shape, bench, outputs, inputs, out_type, label)
            )
    torch.backends.cuda.preferred_blas_library("default")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only peers whose name contains NAME")
    parser.add_argument("--resume", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    begin = time.time()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    bench = Bench(arguments.only, arguments.resume)
    torch_attention(bench)
    linear(bench)
    flashinfer(bench)
    print(f"{time.time() - begin:.0f} s")
    return bench.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
