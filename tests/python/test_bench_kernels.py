"""`kvanta bench attention`, `linear` and `recurrent`: what they report is verified, and adds up."""

import json
from pathlib import Path

import pytest
import tolerance
from command_line import kvanta

from kvanta import _core


def test_bench_attention_of_a_gpu() -> None:
    done = kvanta("bench", "attention", "--device", "cuda", "--formats", "int4", "--context", "64")
    if done.returncode != 0:  # a machine without a GPU, or a build without CUDA
        assert "device cuda: " in done.stderr
        assert "; there are: cpu" in done.stderr
        assert done.stderr.count("\n") == 1
        return
    assert "copy of its memory" in done.stdout


def test_bench_attention(tmp_path: Path) -> None:
    words = ["--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--context", "256", "--threads", "1"]
    report_file, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    words += ["--layers", "2", "--seconds", "0", "--json", str(report_file), "--plot", str(picture)]
    done = kvanta("bench", "attention", "--formats", "bf16", "int4", *words)
    assert done.returncode == 0, done.stderr
    report = json.loads(report_file.read_text())
    assert [row["format"] for row in report["rows"]] == ["bf16", "int4"]
    for row in report["rows"]:
        assert row["ns_min"] > 0
        assert row["max_error"] < (tolerance.NARROW_ATTENTION if row["format"] == "int4" else tolerance.BF16_ATTENTION)
        parts = {"memory": row["memory_ns"], "dot": row["dot_ns"], "kernel": row["in_cache_ns"]}
        assert parts[row["binds"]] == max(parts.values()) > 0
        assert row["format"] in done.stdout
    assert set(report["limit_gb_s"]) == {"1"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_linear(tmp_path: Path) -> None:
    words = ["--layers", "128x40", "--rows", "1", "20", "--threads", "1", "--seconds", "0"]
    weights = ["bf16", "int4"]
    report_file = tmp_path / "bench.json"
    done = kvanta("bench", "linear", "--weights", *weights, *words, "--json", str(report_file))
    assert done.returncode == 0, done.stderr
    report = json.loads(report_file.read_text())
    assert [(row["weights"], row["rows"]) for row in report["rows"]] == [(w, n) for w in weights for n in (1, 20)]
    for row in report["rows"]:
        assert 0 < row["max_error"] <= 1  # verified: unlike double, but within its roundings
        assert row["share_of_read"] > 0
        assert row["operations_per_second"] == pytest.approx(2 * row["rows"] * 128 * 40 / row["ns"] * 1e9)
    assert [limit["weights"] for limit in report["limits"]] == weights


@pytest.mark.parametrize("weights", ["f16", "f32", "int8", "fp8", "w8a16", "w4a16", "nf4", "Q4_K"])
def test_every_storage_is_verified(weights: str) -> None:
    """Without the machine's limits, whose measurement takes seconds."""
    for row in _core.run_linear_bench(weights, "auto", 1, 256, 40, [1, 20], 0.0):
        assert (row["weights"], 0 < row["max_error"] <= 1) == (weights, True)
        assert row["operations_per_second"] == pytest.approx(2 * row["rows"] * 256 * 40 / row["ns"] * 1e9)


def test_bench_recurrent(tmp_path: Path) -> None:
    report_file = tmp_path / "bench.json"
    words = ["--decode", "2", "--prompt", "3", "--threads", "1", "--seconds", "0", "--json", str(report_file)]
    done = kvanta("bench", "recurrent", "--layers", "lfm2-8b", "nemotron-3-nano", *words)
    assert done.returncode == 0, done.stderr
    report = json.loads(report_file.read_text())
    work = [(row["layer"], row["sequences"], row["tokens"]) for row in report["rows"]]
    assert work == [(name, *counts) for name in ("lfm2-8b", "nemotron-3-nano") for counts in ((2, 1), (1, 3))]
    (limit,) = report["limits"]
    for row in report["rows"]:
        assert row["bytes_per_second"] == pytest.approx(2 * row["sequences"] * row["state_bytes"] / row["ns"] * 1e9)
        assert row["share_of_memory"] == pytest.approx(row["bytes_per_second"] / limit["updated_bytes_per_second"])
    assert "Mamba-2" in done.stdout


@pytest.mark.parametrize("layer", _core.recurrent_layers())
def test_every_recurrent_layer_is_verified(layer: str) -> None:
    row = _core.run_recurrent_bench(layer, "auto", 2, 1, 1, 0.0)
    assert 0 <= row["max_error"] < 1e-4


def test_recurrent_layers_are_named() -> None:
    done = kvanta("bench", "recurrent", "--layers", "mamba", "--seconds", "0")
    assert done.returncode != 0
    assert "unknown layer 'mamba'; expected one of qwen3.6-27b" in done.stderr
