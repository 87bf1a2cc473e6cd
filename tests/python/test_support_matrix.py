"""The support matrix in the documents: every format on every unit, in both phases, and nothing that was not run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support_matrix import PHASES, ROOT, read_cells

from kvanta import _core


def test_every_cell_of_every_format_was_run() -> None:
    rows = json.loads((ROOT / "docs" / "results" / "support.json").read_text(encoding="utf-8"))["rows"]
    assert [row["format"] for row in rows] == _core.format_names(), "run tools/support_matrix.py"
    for row in rows:
        units = row.keys() - {"format"}
        assert {"portable", "avx2"} <= units
        assert {"avx512", "avx512_emulated"} & units
        assert {"avx512fp16", "avx512fp16_emulated"} & units
        assert {"zen4", "zen4_emulated"} & units
        assert {"amx", "amx_emulated"} & units
        for unit in units:
            assert row[unit].keys() == set(PHASES), f"{row['format']} on {unit}"
            assert all(0 <= share <= 1 for share in row[unit].values())


def report(**properties: str) -> dict[str, Any]:
    tests = [
        {"name": "EveryPair/avx2", "time": "1s", "decode.int8": "0.2", "prefill.int8": "0.3", **properties},
        {"name": "EveryHead/avx2", "time": "1s", "prefill.int8": "0.5"},
        {"name": "EveryPair/portable", "time": "1s", "decode.int8": "0", "prefill.int8": "0.1"},
    ]
    return {"tests": 3, "testsuites": [{"name": "Units/AccuracyTest", "testsuite": tests}]}


def test_the_worst_of_all_tests_counts() -> None:
    assert read_cells(report()) == [
        {
            "format": "int8",
            "avx2": {"decode": 0.2, "prefill": 0.5},
            "portable": {"decode": 0.0, "prefill": 0.1},
        }
    ]


def test_a_failed_test_proves_nothing() -> None:
    with pytest.raises(SystemExit, match="EveryPair/avx2 failed"):
        read_cells(report(failures=[{"failure": "no"}]))  # type: ignore[arg-type]
