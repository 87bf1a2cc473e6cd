"""cmake --install gives a package that another CMake project finds, links and runs: examples/cpp, on stories260k."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvanta import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("KVANTA_BUILD", "build/release")
MODEL = ROOT / "models/stories260k"
PROMPT = [1, 403, 407, 261, 378]


def run(*command: str | Path, expect: int = 0) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built against a fresh installation; nothing of the source tree but examples/cpp is in its reach."""
    if not (BUILD / "libkvanta.a").is_file():
        pytest.skip(f"no C++ build in {BUILD}; scripts/test makes one, KVANTA_BUILD names another")
    folder = tmp_path_factory.mktemp("install")
    run("cmake", "--install", BUILD, "--prefix", folder / "prefix")
    source, build = ROOT / "examples/cpp", folder / "build"
    run("cmake", "-G", "Ninja", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={folder / 'prefix'}")
    run("cmake", "--build", build)
    return build / "generate"


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_example_generates_what_python_generates(example: Path, dtype: str) -> None:
    output = run(example, MODEL, dtype, *map(str, PROMPT))
    tokens, cost = output.strip().splitlines()
    llm = LLM(model=str(MODEL), kv_cache_dtype=dtype)
    expected = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(max_tokens=32, temperature=0.0))
    assert [int(token) for token in tokens.split()] == list(expected[0].outputs[0].token_ids)
    match = re.search(rf"{dtype} cache: (\d+) bytes per token", cost)
    assert match
    assert int(match[1]) == round(llm.stats()["bytes_per_token"])


def test_requests_that_run_at_once(example: Path) -> None:
    lines = run(example.parent / "concurrent", MODEL, "int8", *map(str, PROMPT)).splitlines()
    llm = LLM(model=str(MODEL), kv_cache_dtype="int8")
    for name, temperature, seed in (("greedy", 0.0, None), ("sampled", 0.8, 7)):
        params = SamplingParams(max_tokens=16, temperature=temperature, seed=seed)
        expected = llm.generate([{"prompt_token_ids": PROMPT}], params)[0].outputs[0].token_ids
        assert [int(line.split()[1]) for line in lines if line.startswith(name)] == list(expected)


def test_example_reports_an_unknown_format_in_one_line(example: Path) -> None:
    output = run(example, MODEL, "int77", "1", expect=2)
    assert "int77" in output
    assert "int8" in output
    assert len(output.strip().splitlines()) == 1


def test_version_is_the_project_version() -> None:
    import kvanta

    found = re.search(r"project\(kvanta VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert found
    assert kvanta.__version__ == found[1]


def test_objects_that_other_threads_hold_are_not_reported_at_exit() -> None:
    script = (
        "import threading; from kvanta import _core\n"
        "def hold(params): threading.Event().wait()\n"
        "threading.Thread(target=hold, args=[_core.SamplingParams()], daemon=True).start()\n"
    )
    assert run(sys.executable, "-c", script) == ""
