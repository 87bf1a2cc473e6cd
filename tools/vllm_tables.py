"""The tables of docs/results/*.json that compare with vLLM on a CPU."""

from __future__ import annotations

from result_table import Table

VLLM_TABLES = {
    "vllm-cpu": Table(
        "benchmarks/vllm_cpu.py --vllm V --vllm-threads 0-1 --pairs 1 --json docs/results/vllm-cpu.json",
        "rows",
        (
            ("model", "model", ""),
            ("new tokens/s", "kvanta.output_throughput", ",.0f"),
            ("vLLM's", "vllm.output_throughput", ",.0f"),
            ("times", "times", ".1f"),
            ("of bench engine's", "serve_share", ".0%"),
            ("start (s)", "kvanta.start_s", ".1f"),
            ("vLLM's", "vllm.start_s", ".1f"),
            ("memory beside the weights (MiB)", "beside_weights_mib", ".0f"),
        ),
    ),
    **{
        name: Table(
            f"benchmarks/vllm_prompts.py --vllm V --preload TCMALLOC IOMP5 --json docs/results/{name}.json",
            "rows",
            (
                ("head_dim", "head_dim", "d"),
                ("new tokens", "tokens", ",d"),
                ("after", "depth", ",d"),
                ("vLLM (tokens/s)", "vllm", ".1f"),
                ("bf16 cache", "bf16", ".1f"),
                ("times", "bf16_times", ".2f"),
                ("int8 cache", "int8", ".1f"),
                ("times", "int8_times", ".2f"),
                ("int4 cache", "int4", ".1f"),
                ("times", "int4_times", ".2f"),
            ),
        )
        for name in ("vllm-prompts", "vllm-prompts-avx512")
    },
}
