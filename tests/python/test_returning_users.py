"""benchmarks/returning_users.py on the shipped model: a cache that holds everybody computes only what is new."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "returning_users.py"


def _rows(file: Path, *words: str) -> list[dict[str, Any]]:
    sizes = ["--first-tokens", "256", "--turn-tokens", "32", "--output-tokens", "16", "--users", "4"]
    command = [
        sys.executable,
        str(SCRIPT),
        "stories260k",
        *sizes,
        *words,
        "--formats",
        "bf16",
        "int8",
        "--json",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def test_a_smaller_cache_remembers_more(tmp_path: Path) -> None:
    rows = {row["format"]: row for row in _rows(tmp_path / "report.json", "--memory", "700KiB")}
    assert rows["bf16"]["fitting_users"] < 4 == rows["int8"]["fitting_users"]
    # Two rounds of 4: 304 tokens, then 352. Of a history of 272 (320) tokens all but the answer's last, whose keys were
    # never computed, are in whole pages of 16: 256 (304).
    assert rows["int8"]["prompt_tokens"] == 4 * (304 + 352)
    assert rows["int8"]["cached_share"] * rows["int8"]["prompt_tokens"] == 4 * (256 + 304)
    assert rows["bf16"]["cached_share"] < rows["int8"]["cached_share"]


def test_a_disk_remembers_everybody(tmp_path: Path) -> None:
    """Memory holds two users, the disk all four: as much is found as in a memory for all."""
    words = ("--memory", "400KiB", "--kv-cache-dir", str(tmp_path / "cache"), "--kv-cache-dir-bytes", "8MiB")
    rows = {(row["format"], row["disk"]): row for row in _rows(tmp_path / "report.json", *words)}
    for name in ("bf16", "int8"):
        with_disk = rows[name, True]
        assert rows[name, False]["cached_share"] < with_disk["cached_share"]
        assert with_disk["stored_mib"] > 0
        turns = with_disk["turns_per_s"] / rows[name, False]["turns_per_s"]
        assert with_disk["times"]["without_disk"] == pytest.approx(turns)
    assert not list((tmp_path / "cache").iterdir())
