"""`kvanta bench engine`: counts add up, the report is one that bench serve reads, a full queue is counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvanta.cli import main
from kvanta.loadgen.report import read_report


def bench(tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "report.json"
    options = ["--kv-cache-memory-bytes", "16MiB", "--threads", "1", "--json", str(file)]
    assert main(["bench", "engine", "stories260k", *words, *options]) == 0
    assert read_report(str(file)) == json.loads(file.read_text())
    return read_report(str(file))


def test_counts_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(
        tmp_path, "--requests", "6", "--input-len", "20", "--output-len", "9", "--kv-cache-dtype", "int8", "--profile"
    )
    assert report["label"] == report["cache_dtype"] == "int8"
    (run,) = report["runs"]
    assert run["completed"] == 6
    assert run["input_tokens"] == 6 * 20
    assert run["output_tokens"] == 6 * 9
    assert run["errors"] == {}
    assert run["ttft_ms"]["p50"] <= run["e2e_ms"]["p50"]
    engine = run["engine"]
    assert 9 <= engine["steps"] <= 6 * 9
    assert engine["model_ms"] + engine["outside_model_ms"] == pytest.approx(engine["step_ms"])
    assert 1 <= engine["most_tokens_per_step"] <= 6
    assert 1 <= engine["full_steps"] <= engine["steps"]
    assert 0 < engine["full_step_outside_model_ms"]["p50"] <= engine["full_step_outside_model_ms"]["p99"]
    parts = sum(engine[f"{name}_ms"] for name in ("schedule", "masks", "sample", "callback"))
    assert 0 < parts <= engine["outside_model_ms"]
    rows = {row["name"]: row for row in engine["profile"]}
    assert rows["attention"]["calls"] == 5 * engine["steps"], "the model has five layers"
    assert sum(row["ms_per_step"] for row in rows.values()) <= engine["model_ms"]
    shown = capsys.readouterr().out
    assert "outside it" in shown
    assert "linear q_proj|k_proj|v_proj" in shown
    assert rows["gated delta net"]["calls"] == 0, "the model has no such layers"
    assert "gated delta net" not in shown


def test_rates_and_shared_prefixes(tmp_path: Path) -> None:
    report = bench(
        tmp_path,
        *("--requests", "5", "--input-len", "8", "--output-len", "4", "--shared-prefix-len", "128"),
        *("--rate", "2000", "4000", "--concurrency", "1", "--goodput", "e2e:60000"),
    )
    assert [run["rate"] for run in report["runs"]] == [2000.0, 4000.0]
    for run in report["runs"]:
        assert run["completed"] == 5
        assert run["peak_concurrency"] == 1
        assert run["cached_tokens"] == 4 * 128, "all but the first find the beginning in the cache"
        assert run["engine"]["prefix_hit_tokens"] == 4 * 128
        assert run["engine"]["prefix_queried_tokens"] == 5 * 136
        assert run["engine"]["profile"] == []
        assert run["goodput"]["requests"] == 5


def test_a_full_queue_is_counted(tmp_path: Path) -> None:
    report = bench(
        tmp_path, "--requests", "9", "--input-len", "4", "--output-len", "64", "--max-num-seqs", "1",
        *("--max-queued-requests", "2"),
    )  # fmt: skip
    (run,) = report["runs"]
    assert run["completed"] + run["failed"] == 9
    assert 3 <= run["completed"] < 9
    assert run["errors"]["queue_full"]["count"] == run["failed"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--input-len", "600"], "request 0 has 600 + 128 tokens, max_model_len is 512"),
        (["--requests", "0"], "requests: 0 is not in 1"),
        (["--concurrency", "0"], "the concurrency is 0"),
        (["--rate", "0"], "the rate must be above 0, got 0 requests per second"),
        (["--goodput", "speed:3"], "names none of ttft, tpot, e2e"),
    ],
)
def test_bad_input(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "stories260k", "--kv-cache-memory-bytes", "8MiB", *words]) == 2
    assert reason in capsys.readouterr().err
