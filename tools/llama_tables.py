"""The tables of docs/results/llama-speed*.json: llama.cpp and ik_llama.cpp on the same file."""

from __future__ import annotations

from result_table import Table

# Models compared with ik_llama.cpp: name, shape and types of benchmarks/random_gguf.py, what is measured.
_LARGE_MODELS = (
    ("1b", "llama-1b", "Q4_K_M", "--ik-repack --decode --prefill 512@0 --repeats 3"),
    ("8b", "llama-8b", "Q4_K_M", "--new-tokens 32 --ik-repack --decode 0 8192 --prefill 512@0 --repeats 2"),
    # Decode at 8,192 of the next two has a separate run: `--decode 8192 --prefill --repeats 1`.
    ("30b-a3b", "qwen3-30b-a3b", "Q4_K_M", "--new-tokens 128 --ik-repack --decode 0 --prefill 512@0 --repeats 3"),
    ("gpt-oss-20b", "gpt-oss-20b", "MXFP4", "--new-tokens 64 --ik-repack --decode 0 --prefill 512@0"),
)
LLAMA_TABLES = {
    "llama-speed": Table(
        "benchmarks/llama_speed.py SmolLM2-135M-Instruct.Q4_1.gguf --llama-bench PATH "
        "--json docs/results/llama-speed.json",
        "works",
        (
            ("work", "work", ""),
            ("bf16 cache (tokens/s)", "ours.bf16", ".1f"),
            ("int8 cache", "ours.int8", ".1f"),
            ("int4 cache", "ours.int4", ".1f"),
            ("llama.cpp's best", "llama_cpp.tokens_s", ".1f"),
            ("with cache", "llama_cpp.cache", ""),
            ("ik_llama.cpp's best", "ik_llama_cpp.tokens_s", ".1f"),
            ("with cache", "ik_llama_cpp.cache", ""),
            ("times the best of theirs", "times_best", ".2f"),
        ),
    ),
    **{
        f"llama-speed-{model}": Table(
            f"benchmarks/random_gguf.py {shape} {types} FILE` and `benchmarks/llama_speed.py FILE --ik-bench PATH "
            f"--weight-dtype auto --caches int4 --peer-caches f16 {works} "
            f"--json docs/results/llama-speed-{model}.json",
            "works",
            (
                ("work", "work", ""),
                ("int4 cache (tokens/s)", "ours.int4", ".1f"),
                ("ik_llama.cpp's best", "ik_llama_cpp.tokens_s", ".1f"),
                ("with cache", "ik_llama_cpp.cache", ""),
                ("times the best of theirs", "times_best", ".2f"),
            ),
        )
        for model, shape, types, works in _LARGE_MODELS
    },
}
