"""The tables of docs/results/*.json about prefix caches and the users that a cache holds."""

from __future__ import annotations

from result_table import Table

CACHE_TABLES = {
    "more-users": Table(
        "benchmarks/more_users.py smollm2 --json docs/results/more-users.json --plot docs/results/more-users.png",
        "rows",
        (
            ("cache", "format", ""),
            ("page (tokens)", "page_size", "d"),
            ("bytes per token", "bytes_per_token", ",.0f"),
            ("users", "users", "d"),
            ("times bf16's", "times.users", ".2f"),
            ("new tokens/s while all decode (times bf16's)", "times.decode", ".2f"),
            ("all tokens/s at saturation (times bf16's)", "times.saturated", ".2f"),
        ),
    ),
    "levels": Table(
        "kvanta eval smollm2 --text wiki.test.raw --kv-cache-dtype int8 --kv-cache-floor t3 --levels 0 10 25 50 75 100 "
        "--json docs/results/levels.json",
        "formats",
        (
            ("cache", "name", ""),
            ("bits", "bits_per_element", ".4g"),
            ("bytes per token", "bytes_per_token", ",.0f"),
            ("mean KL", "kl_mean", ".5f"),
            ("median", "kl_median", ".5f"),
            ("99 %", "kl_p99", ".4f"),
            ("same top token", "top1", ".1%"),
        ),
    ),
    "returning-users": Table(
        "benchmarks/returning_users.py smollm2 --json docs/results/returning-users.json",
        "rows",
        (
            ("cache", "format", ""),
            ("users that it holds", "fitting_users", "d"),
            ("prompt tokens from the cache", "cached_share", ".0%"),
            ("turns per second", "turns_per_s", ".3f"),
            ("times bf16's", "times.turns", ".1f"),
        ),
    ),
    "prefix-cache": Table(
        "benchmarks/prefix_cache.py smollm2 --json docs/results/prefix-cache.json --plot docs/results/prefix-cache.png",
        "rows",
        (
            ("cache", "format", ""),
            ("files (MiB)", "stored_mib", ".0f"),
            ("first token, cold (s)", "cold_s", ".2f"),
            ("after a restart (s)", "warm_s", ".3f"),
            ("times faster", "times", ".0f"),
            ("read with its checks (GB/s)", "read_gb_s", ".1f"),
            ("prompts while writing (of without)", "prompt_share", ".1%"),
            ("decode while writing (of without)", "decode_share", ".1%"),
        ),
    ),
    "returning-users-disk": Table(
        "benchmarks/returning_users.py smollm2 --kv-cache-dir /var/tmp --kv-cache-dir-bytes 512MiB --memory 50MiB "
        "--users 30 --first-tokens 2000 --order random --rounds 1 --threads 2 --formats bf16 int4 "
        "--json docs/results/returning-users-disk.json",
        "rows",
        (
            ("cache", "format", ""),
            ("on disk", "disk", ""),
            ("users that memory holds", "fitting_users", "d"),
            ("files (MiB)", "stored_mib", ".0f"),
            ("prompt tokens from the cache", "cached_share", ".0%"),
            ("turns per second", "turns_per_s", ".3f"),
            ("times without disk", "times.without_disk", ".1f"),
            ("times bf16's", "times.turns", ".1f"),
        ),
    ),
    "head-restart": Table(
        "benchmarks/head_restart.py stories260k --json docs/results/head-restart.json",
        "rows",
        (
            ("GCS away (s)", "away_s", ".0f"),
            ("requests", "requests", ",d"),
            ("while it was away", "requests_while_away", ",d"),
            ("of other bits", "wrong", "d"),
            ("lost", "lost", "d"),
            ("longest pause of a stream (s)", "longest_pause_s", ".1f"),
            ("a dead replica replaced after (s)", "replica_replaced_s", ".1f"),
        ),
    ),
    "fleet-routing": Table(
        "benchmarks/fleet_routing.py small.gguf conversation_trace.jsonl --costs costs.json --routing round-robin "
        "--json docs/results/fleet-routing.json",
        "rows",
        (
            ("routing", "routing", ""),
            ("found", "live.hit_rate", ".1%"),
            ("simulated", "simulated.hit_rate", ".1%"),
            ("difference", "difference.hit_rate", "+.1%"),
            ("first token, p50 (s)", "live.ttft_p50_s", ".3f"),
            ("simulated", "simulated.ttft_p50_s", ".3f"),
            ("difference", "difference.ttft_p50_s", "+.1%"),
            ("p99 (s)", "live.ttft_p99_s", ".3f"),
            ("simulated", "simulated.ttft_p99_s", ".3f"),
            ("difference", "difference.ttft_p99_s", "+.1%"),
        ),
    ),
    "disk-trace": Table(
        "benchmarks/disk_trace.py stories260k conversation_trace.jsonl --json docs/results/disk-trace.json",
        "rows",
        (
            ("requests", "requests", ",d"),
            ("failed", "failed", "d"),
            ("minutes", "minutes", ".0f"),
            ("prompt tokens from the cache", "cached_share", ".0%"),
            ("from disk", "disk_share", ".0%"),
            ("written (MiB)", "written_mib", ",.0f"),
            ("limit (MiB)", "limit_mib", ",.0f"),
            ("most on disk (MiB)", "most_mib", ",.1f"),
            ("files removed for others", "evictions", ",d"),
            ("errors of the disk", "errors", "d"),
            ("growth of memory", "memory_growth", ".1%"),
        ),
    ),
    "page-reads": Table(
        "page_reads_bench --dir DIR --json docs/results/page-reads.json",
        "rows",
        (
            ("record (bytes)", "bytes", ",d"),
            ("cold", "cold", ""),
            ("at once", "depth", "d"),
            ("threads: GB/s", "threads.gb_s", ".2f"),
            ("CPU (ms)", "threads.cpu_ms", ".0f"),
            ("io_uring: GB/s", "io_uring.gb_s", ".2f"),
            ("CPU (ms)", "io_uring.cpu_ms", ".0f"),
        ),
    ),
    "page-packing": Table(
        "benchmarks/page_packing.py smollm2 --text wiki.test.raw --json docs/results/page-packing.json",
        "rows",
        (
            ("cache", "format", ""),
            ("zstd -1 leaves", "zstd.1.left", ".0%"),
            ("its halves", "halves.left", ".0%"),
            ("an ideal coder", "entropy", ".0%"),
            ("packs (GB/s)", "zstd.1.pack_gb_s", ".2f"),
            ("unpacks (GB/s)", "zstd.1.unpack_gb_s", ".1f"),
            ("halves (GB/s)", "halves.unpack_gb_s", ".1f"),
            ("pages are read (GB/s)", "read_gb_s", ".1f"),
        ),
    ),
    "sizing": Table(
        "python benchmarks/sizing.py --json docs/results/sizing.json",
        "rows",
        (
            ("RAM (GiB)", "memory_gib", "d"),
            ("model", "model", ""),
            ("weights", "weights", ""),
            ("weights (GiB)", "weights_gib", ".1f"),
            ("cache (GiB)", "cache_gib", ".1f"),
            ("users, bf16 cache", "users.bf16", "d"),
            ("int8", "users.int8", "d"),
            ("int4", "users.int4", "d"),
        ),
    ),
    "sparse-capacity": Table(
        "python benchmarks/sparse_capacity.py --json docs/results/sparse-capacity.json",
        "rows",
        (
            ("model", "model", ""),
            ("latents", "latents", ""),
            ("keys of indexers", "keys", ""),
            ("bytes per token", "bytes_per_token", ",.0f"),
            ("1 user (GiB)", "users_gib.1", ".2f"),
            ("8 users (GiB)", "users_gib.8", ".1f"),
            ("64 users (GiB)", "users_gib.64", ".1f"),
        ),
    ),
}
