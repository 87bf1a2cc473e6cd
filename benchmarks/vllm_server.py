"""vLLM's server on a CPU, as the benchmarks that compare with it start it."""

from __future__ import annotations

import subprocess
from pathlib import Path

CACHE_GIB = 2
"""Memory of its KV cache, and of Kvanta's in the comparison."""


def vllm_version(command: Path) -> str:
    """Version of vLLM's command. Raises CalledProcessError and OSError."""
    return subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]


def vllm_environment(cpus: str) -> dict[str, str]:
    """Environment of `vllm serve`. cpus: VLLM_CPU_OMP_THREADS_BIND."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": cpus,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
