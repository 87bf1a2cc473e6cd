"""The tables of docs/results/*.json that compare servers on a CPU, vLLM's among them."""

from __future__ import annotations

from result_table import Table

VLLM_TABLES = {
    "many-users": Table(
        'benchmarks/many_users.py --serve "Kvanta=kvanta serve MODEL ..." --json docs/results/many-users.json '
        "--plot docs/results/many-users.png",
        "rows",
        (
            ("server", "label", ""),
            ("gap before the long prompt (ms)", "stalls.median_before_ms", ".0f"),
            ("largest gap during it", "stalls.largest_ms", ",.0f"),
            ("times", "stalls.largest_times_median", ".1f"),
            ("its first token (times alone)", "stalls.times_alone", ".2f"),
            ("tokens/s of all together", "stalls.tokens_per_s", ",.0f"),
            ("short prompt after it (s)", "short.short_s", ".2f"),
            ("times alone", "short.short_times_alone", ".1f"),
            ("the long one (times alone)", "short.long_times_alone", ".2f"),
            ("long one among many short ones (times alone)", "many.long_times_alone", ".2f"),
            ("one prompt after another user's many (times alone)", "users.one_times_alone", ".1f"),
            *(
                (f"goodput, {load} (requests/s)", f"loads.{load}.goodput.request_throughput", ".3f")
                for load in ("conversation", "chat", "agents")
            ),
        ),
    ),
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
            ("memory without weights (MiB)", "beside_weights_mib", ".0f"),
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
