"""The tables that documents show of docs/results/*.json: columns, formats, and the command that measured each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention_rows import rows_of_shape
from cache_tables import CACHE_TABLES
from gpu_tables import GPU_TABLES
from linear_rows import ISA_COLUMNS, TORCH_COLUMNS, compare_isa
from llama_tables import LLAMA_TABLES
from peer_rows import compare
from rank_tables import RANK_TABLES
from recurrent_tables import RECURRENT_TABLES
from result_table import Rows, Table
from sparse_tables import SPARSE_TABLES
from vllm_tables import VLLM_TABLES


def _compare_with_own(result: Mapping[str, Any], folder: Path) -> Rows:
    return compare(result, json.loads((folder / "eval.json").read_text()))


def _held_out(result: Mapping[str, Any], _: Path) -> Rows:
    rows = []
    for each in result["search"]:
        low, high = each["held_out"]["difference_ci95"]
        interval = f"{low:+.5f} to {high:+.5f}"
        rows.append(
            {**each["held_out"], "budget": each["budget"], "bits": each["bits_per_element"], "interval": interval}
        )
    return rows


_DISTRIBUTION = (
    ("median", "kl_median", ".5f"),
    ("99 %", "kl_p99", ".4f"),
    ("max", "kl_max", ".2f"),
    ("same top token", "top1", ".1%"),
    ("perplexity ratio", "ppl_ratio", ".4f"),
)
_SEARCH = (
    ("at most (bits)", "budget", ".4g"),
    ("per layer (bits)", "bits", ".4g"),
    ("mean KL", "kl_mean", ".5f"),
    ("best that is the same in all layers", "uniform", ""),
    ("bits", "uniform_bits_per_element", ".4g"),
    ("mean KL", "uniform_kl_mean", ".5f"),
    ("difference", "difference", "+.5f"),
    ("95 %", "interval", ""),
)
_UNITS = (
    *("portable", "avx2", "avx512_emulated", "avx512", "avx512fp16_emulated", "avx512fp16"),
    *("zen4_emulated", "zen4", "amx_emulated", "amx"),
)
_MODELS = "tools/model_matrix.py build/logs/pytest.xml --kernels build/release/tests/kernels_test"
_MODEL_COLUMNS = (
    ("F32, BF16, F16", "floats"),
    ("FP8", "fp8"),
    ("INT8", "int8"),
    ("INT4", "int4"),
    ("NVFP4, MXFP4", "fp4"),
    ("NF4", "nf4"),
    ("GGUF floats", "gguf_floats"),
    ("GGUF blocks", "gguf_blocks"),
)
_LLAMA_CPP = (
    "benchmarks/llama_cpp.py --llama-perplexity PATH --text wiki.test.raw --formats q8_0 q4_0 "
    "--json docs/results/llama-cpp.json"
)


def _attention(
    shape: str, *columns: tuple[str, str, str], isa: str = "", shapes: str = "", formats: str = "NAMES", name: str = ""
) -> Table:
    """Attention of one shape on `isa` (the machine's best by default), measured with --shapes `shapes`.

    `name`: of the result file, if not that of `isa`.
    """
    name = name or isa
    source = f"attention-{name}" if name else "attention"
    unit = f"--isa {isa} " if isa else ""
    plot = "" if name else " --plot docs/results/attention.png"
    shapes = shapes or (shape if name else "all")
    command = (
        f"kvanta bench attention {unit}--shapes {shapes} --formats {formats} --json docs/results/{source}.json{plot}"
    )
    threads = tuple(
        (title.format(count), f"t{count}.{key}", style)
        for count in (1, 2)
        for title, key, style in (
            ("{} thread: memory" if count == 1 else "{} threads: memory", "memory", ".0%"),
            ("dot", "dot", ".0%"),
            ("in cache", "in_cache", ".0%"),
            ("bound by", "binds", ""),
            *columns,
            ("times bf16", "times_bf16", ".2f"),
        )
    )
    return Table(command, rows_of_shape(shape), (("cache", "format", ""), *threads), source=source)


TABLES = {
    "speculation": Table(
        "python benchmarks/speculation.py smollm2 --tokens 160 --pairs 3 --json docs/results/speculation.json",
        "rows",
        (
            ("work", "work", ""),
            ("plain (tokens/s)", "plain_tokens_per_s", ".0f"),
            ("with n-grams", "speculative_tokens_per_s", ".0f"),
            ("times", "ratio", ".2f"),
            ("draft tokens", "draft_tokens", "d"),
            ("accepted", "accepted_tokens", "d"),
            ("tokens", "generated_tokens", "d"),
        ),
    ),
    "attention-avx512fp16": _attention("decode", isa="avx512fp16", shapes="decode prefill"),
    "attention-avx512fp16-prefill": _attention(
        "prefill", ("of bf16 peak", "share_of_bf16_peak", ".0%"), isa="avx512fp16", shapes="decode prefill"
    ),
    "attention-zen4": _attention("decode", shapes="decode prefill", name="zen4"),
    "attention-zen4-prefill": _attention("prefill", shapes="decode prefill", name="zen4"),
    "attention-trellis": _attention("decode", formats="bf16 int4 t4 t3 t2 klt3 klt2 int8", name="trellis"),
    "attention-avx2": _attention("decode", isa="avx2"),
    "attention-decode": _attention("decode"),
    "attention-batch": _attention("batch"),
    "attention-decode-1k": _attention("decode-1k"),
    "attention-short": _attention("short"),
    "attention-portable": _attention("decode", isa="portable"),
    "attention-prefill": _attention("prefill", ("of bf16 peak", "share_of_bf16_peak", ".0%")),
    "linear-amx": Table(
        "kvanta bench linear --weights bf16 --isa amx --layers 576x3072 576x49152 4096x4096 --rows 1 16 64 1024 "
        "--json docs/results/linear-amx.json` and the same with `--isa avx512",
        compare_isa("avx512"),
        ISA_COLUMNS,
    ),
    "linear-torch": Table(
        "python benchmarks/linear_vs_torch.py --turns 3 --seconds 0.06 --json docs/results/linear-torch.json",
        "rows",
        TORCH_COLUMNS,
    ),
    "linear-torch-avx512": Table(
        "python benchmarks/linear_vs_torch.py --turns 3 --seconds 0.06 --json docs/results/linear-torch-avx512.json",
        "rows",
        TORCH_COLUMNS,
    ),
    "eval-tasks": Table(
        "kvanta eval smollm2 --tasks needle generation --context 512 --needles 1 --generation-tokens 96 "
        "--formats int4 fp8_e5m2 --json docs/results/eval-tasks.json",
        "formats",
        (
            ("cache", "name", ""),
            ("bits", "bits_per_element", ".4g"),
            ("needles", "needle", ".0%"),
            ("equal start (tokens)", "generation.equal_tokens_mean", ".1f"),
            ("mean KL there", "generation.kl_mean", ".5f"),
            ("same top token there", "generation.top1", ".1%"),
        ),
    ),
    "eval": Table(
        "kvanta eval smollm2 --text wiki.test.raw --formats NAMES --json docs/results/eval.json "
        "--plot docs/results/eval.png",
        "formats",
        (
            ("cache", "name", ""),
            ("bits", "bits_per_element", ".4g"),
            ("bytes per token", "bytes_per_token", ",.0f"),
            ("mean KL", "kl_mean", ".5f"),
            *_DISTRIBUTION,
            ("clipped", "saturated", "d"),
        ),
    ),
    "query": Table(
        "kvanta eval smollm2 --text wiki.test.raw --formats int4+query+exact=2 k=int5_g32+query,v=int4 "
        "int3_g32+query int4 int4+query k=t4+query,v=t4 k=t4+query,v=t4+exact=2 k=t3+query,v=t3 "
        "k=t3+query,v=t3+exact=2 k=klt3,v=t3 k=klt3,v=t3+exact=2 k=t2+query,v=t2 k=klt2,v=t2 k=klt2,v=t2+exact=2 "
        "--json docs/results/query.json",
        "formats",
        (("cache", "name", ""), ("bits", "bits_per_element", ".4g"), ("mean KL", "kl_mean", ".5f"), *_DISTRIBUTION),
    ),
    "query-positions": Table(
        "benchmarks/query_positions.py smollm2 --text wiki.test.raw --contexts 2048 8192 --formats int4 int4+query "
        "--json docs/results/query-positions.json",
        "rows",
        (
            ("cache", "format", ""),
            ("matrices for", "calibration", ""),
            ("mean KL at 2,048 tokens", "kl_mean.2048", ".5f"),
            ("at 8,192 tokens", "kl_mean.8192", ".5f"),
        ),
    ),
    "simulated-scales": Table(
        "benchmarks/simulate_scales.py smollm2 query.safetensors --calibration my.txt --text wiki.test.raw --windows 1 "
        "--json docs/results/simulated-scales.json",
        "rows",
        (
            ("variant", "variant", ""),
            ("mean KL", "kl_mean", ".4f"),
            ("median", "kl_median", ".4f"),
            ("standard error", "standard_error", ".4f"),
        ),
    ),
    "llama-cpp": Table(
        _LLAMA_CPP,
        "rows",
        (
            ("llama.cpp's cache", "format", ""),
            ("rotated", "rotated", ""),
            ("bits", "bits_per_element", ".4g"),
            ("mean KL", "kl_mean", ".5f"),
            ("standard error", "kl_mean_error", ".5f"),
            *_DISTRIBUTION,
        ),
    ),
    "llama-cpp-beside": Table(
        _LLAMA_CPP,
        _compare_with_own,
        (
            ("llama.cpp's (bits)", "label", ""),
            ("mean KL", "kl_mean", ".5f"),
            ("Kvanta's of at most these bits", "by_pages.label", ""),
            ("mean KL", "by_pages.kl_mean", ".5f"),
            ("times less", "by_pages.times", ".1f"),
            ("with its exact pages counted", "by_window.label", ""),
            ("mean KL", "by_window.kl_mean", ".5f"),
            ("times less", "by_window.times", ".1f"),
        ),
        source="llama-cpp",
    ),
    "support": Table(
        "tools/support_matrix.py build/release/tests/attention_test",
        "rows",
        (
            ("cache", "format", ""),
            *(
                (f"{unit.replace('_', ' ')}, {phase}", f"{unit}.{phase}", ".2%")
                for unit in _UNITS
                for phase in ("decode", "prefill")
            ),
        ),
    ),
    "models": Table(
        _MODELS,
        "architectures",
        (
            ("architecture", "architecture", ""),
            *((title, f"cpu.{key}", "") for title, key in _MODEL_COLUMNS),
            ("GPU, emulated", "gpu_emulated.floats", ""),
            ("reason", "refusal", ""),
        ),
    ),
    "model-weights": Table(
        _MODELS,
        "weights",
        (
            ("weights", "weights", ""),
            ("architectures on a CPU", "cpu", "d"),
            ("on an emulated GPU", "gpu_emulated", "d"),
        ),
        source="models",
    ),
    "model-kernels": Table(
        _MODELS,
        "kernels",
        (("storage", "storage", ""), *((unit.replace("_", " "), unit, "") for unit in _UNITS)),
        source="models",
    ),
    "engine": Table(
        "build/release/benchmarks/engine_bench FOLDER --threads 1 2 --json docs/results/engine.json",
        "rows",
        (
            ("threads", "threads", "d"),
            ("unit", "isa", ""),
            ("decode reads (GB/s)", "decode_gb_s", ".1f"),
            ("machine reads (GB/s)", "read_gb_s", ".1f"),
            ("share", "decode_share_of_bandwidth", ".0%"),
            ("prefill (GFLOP/s)", "prefill_gflop_s", ".0f"),
            ("dot peak (GFLOP/s)", "bf16_dot_gflop_s", ".0f"),
            ("share", "prefill_share_of_peak", ".0%"),
        ),
    ),
    "weights": Table(
        "benchmarks/weights.py SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.raw --tokens 4096 "
        "--json docs/results/weights.json",
        "rows",
        (
            ("weights", "weights", ""),
            ("from", "from", ""),
            ("bytes", "weight_bytes", ",d"),
            ("bytes as bf16", "bf16_weight_bytes", ",d"),
            ("mean KL", "kl_mean", ".5f"),
            *_DISTRIBUTION,
        ),
    ),
    "weight-types": Table(
        "benchmarks/weight_types.py SmolLM2-135M-Instruct.Q4_1.gguf --llama-bin FOLDER --text wiki.test.raw "
        "--tokens 8192 --json docs/results/weight-types.json",
        "rows",
        (
            ("type", "type", ""),
            ("bits per weight", "bits", ".4g"),
            ("Kvanta: mean KL", "kvanta.kl_mean", ".5f"),
            ("99 %", "kvanta.kl_p99", ".4f"),
            ("same top token", "kvanta.top1", ".1%"),
            ("llama.cpp: mean KL", "llama_cpp.kl_mean", ".5f"),
            ("99 %", "llama_cpp.kl_p99", ".4f"),
            ("same top token", "llama_cpp.top1", ".1%"),
            ("times Kvanta's", "times", ".1f"),
        ),
    ),
    "biased-keys": Table(
        "benchmarks/biased_keys.py smollm2 --text wiki.test.raw --json docs/results/biased-keys.json",
        "rows",
        (
            ("keys", "keys", ""),
            ("cache", "format", ""),
            ("mean KL (nats)", "kl_mean", ".5f"),
            ("times the base's", "times_base", ".1f"),
            ("same most likely token", "top1", ".1%"),
        ),
    ),
    **CACHE_TABLES,
    **GPU_TABLES,
    **LLAMA_TABLES,
    **RANK_TABLES,
    **RECURRENT_TABLES,
    **SPARSE_TABLES,
    **VLLM_TABLES,
    "soak": Table(
        "benchmarks/soak.py smollm2 --minutes 10 --warm-up 64 --questions 16 --json docs/results/soak.json",
        lambda result, _: [result],
        (
            ("clients", "clients", "d"),
            ("most waiting at one time", "most_on_their_way", "d"),
            ("requests", "visits", ",d"),
            ("right answers", "outcomes.right", ",d"),
            ("wrong", "outcomes.wrong", ",d"),
            ("proper errors", "outcomes.error", ",d"),
            ("improper ones", "outcomes.improper", ",d"),
            ("refused (429)", "outcomes.refused", ",d"),
            ("malformed (400)", "outcomes.told", ",d"),
            ("costly ones", "outcomes.served", ",d"),
            ("left", "outcomes.left", ",d"),
            ("/health p50 (ms)", "health_ms.p50", ".1f"),
            ("p99", "health_ms.p99", ".1f"),
            ("max", "health_ms.max", ".1f"),
            ("growth of memory", "memory.growth", ".2%"),
            ("pages left in use", "left_over.kv_cache_pages_used", "d"),
        ),
    ),
    "search": Table(
        "kvanta eval smollm2 --text wiki.test.raw --search 4.5 5 5.5 6 6.5 --search-tokens 1024 --search-formats int8 "
        "int6_g32 int5_g32 int4 int3_g32 --search-modifiers +exact=2 --formats NAMES --json docs/results/search.json",
        _held_out,
        _SEARCH,
    ),
    "search-query": Table(
        "kvanta eval smollm2 --text wiki.test.raw --search 4.5 --search-tokens 1024 --search-formats int6_g32 int5_g32 "
        "t4 klt3 --search-modifiers +query+exact=2 --formats NAMES --json docs/results/search-query.json",
        _held_out,
        _SEARCH,
    ),
    "eval-speed": Table(
        "benchmarks/eval_speed.py smollm2 --text wiki.test.raw --formats int4 --pairs 1 "
        "--json docs/results/eval-speed.json",
        "rows",
        (
            ("cache", "format", ""),
            ("tokens", "tokens", ",d"),
            ("times of their prefill", "times", ".2f"),
        ),
    ),
    **{
        name: Table(
            f"benchmarks/weight_batches.py --repeats 2 --json docs/results/{name}.json",
            "rows",
            (
                ("weights", "weights", ""),
                ("prompt tokens/s", "prompt_tokens_s", ",.0f"),
                ("times", "prompt_tokens_s_ratio", ".2f"),
                ("new tokens/s", "new_tokens_s", ",.1f"),
                ("times", "new_tokens_s_ratio", ".2f"),
            ),
        )
        for name in ("weight-batches", "weight-batches-avx512")
    },
    "demo": Table(
        "scripts/demo --json docs/results/demo.json",
        "formats",
        # No tokens per second: a time without the machine's limit says nothing.
        (
            ("cache", "format", ""),
            ("bits", "bits_per_element", ".4g"),
            ("bytes per token", "bytes_per_token", ",.0f"),
            ("tokens in 1 GiB", "tokens_in_1_gib", ",d"),
            ("same most likely token", "equal_top_tokens", ".1%"),
            ("mean KL to bf16 (nats)", "mean_kl", ".5f"),
        ),
    ),
}
