"""The tables of docs/results/*.json about ranks."""

from __future__ import annotations

from result_table import Table

_RANKS = (
    ("ranks", "ranks", ""),
    ("threads of each", "threads_of_each", "d"),
    ("prompt tokens/s", "prompt_tokens_per_s", ",.0f"),
    ("times", "times.prompt_tokens_per_s", ".2f"),
    ("generated tokens/s", "tokens_per_s", ".1f"),
    ("times", "times.tokens_per_s", ".2f"),
    ("by 4 requests", "batch_tokens_per_s", ".1f"),
    ("times", "times.batch_tokens_per_s", ".2f"),
    ("weights in each (MiB)", "weights_mib", ",.0f"),
    ("memory of the largest (MiB)", "largest_pss_mib", ",.0f"),
)
RANK_TABLES = {
    "tensor-parallel": Table(
        "benchmarks/tensor_parallel.py llama-1b.gguf --json docs/results/tensor-parallel.json", "rows", _RANKS
    ),
    "tensor-parallel-8b": Table(
        "benchmarks/tensor_parallel.py llama-8b.gguf --divisions TP --prompt-tokens 256 --tokens 32 "
        "--json docs/results/tensor-parallel-8b.json",
        "rows",
        _RANKS,
    ),
    "tensor-parallel-1gbit": Table(
        "benchmarks/tensor_parallel.py llama-1b.gguf --mbit 1000 --json docs/results/tensor-parallel-1gbit.json",
        "rows",
        _RANKS,
    ),
    "rank-bits": Table(
        "benchmarks/rank_bits.py FOLDER --model MODEL --json docs/results/rank-bits.json",
        "rows",
        (
            ("model", "model", ""),
            ("ranks", "ranks", ""),
            ("requests", "prompts", ",d"),
            ("of other bits", "different", "d"),
        ),
    ),
}
