#!/usr/bin/env python3
"""Writes the support matrix: (format x unit x {decode, prefill}), tested against the reference on the same bytes.

    tools/support_matrix.py build/release/tests/attention_test [--json docs/results/support.json]

Runs the accuracy tests and writes, for each cell, the largest error of all rows that read quantized pages, as a share
of its tolerance (tests/tolerance.h). Nothing is written if a test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("decode", "prefill")


def read_cells(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows by format, {"format": ..., unit: {phase: share}}, from a report of --gtest_output=json.

    Each test has its unit in its name and reports the properties "decode.FORMAT" and "prefill.FORMAT".
    """
    rows: dict[str, dict[str, Any]] = {}
    for suite in report["testsuites"]:
        for test in suite["testsuite"]:
            unit = str(test["name"]).rpartition("/")[2]
            for key, value in test.items():
                phase, _, name = key.partition(".")
                if phase not in PHASES:
                    continue  # gtest's own keys
                if test.get("failures"):
                    raise SystemExit(f"error: {test['name']} failed")
                cell = rows.setdefault(name, {"format": name}).setdefault(unit, {})
                cell[phase] = max(cell.get(phase, 0.0), float(value))
    return list(rows.values())


def run(program: Path, tests: str) -> dict[str, Any]:
    """Runs the tests of a filter, which must find some that pass, and returns their report."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        done = subprocess.run(
            [program.resolve(), f"--gtest_filter={tests}", f"--gtest_output=json:{file}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env={**os.environ, "KVANTA_ALL_CASES": "1"},
        )
        if done.returncode != 0:
            raise SystemExit(f"error: {program.name} failed:\n{done.stdout[-2000:]}")
        report: dict[str, Any] = json.loads(file.read_text())
        if not report["tests"]:
            raise SystemExit(f"error: {program.name} has no test {tests}")
        return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path)
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "results" / "support.json")
    options = parser.parse_args()
    report = run(options.program, "*AccuracyTest.*")
    rows = read_cells(report)
    options.json.write_text(json.dumps({"tests": report["tests"], "rows": rows}, indent=1) + "\n", encoding="utf-8")
    units = sorted({unit for row in rows for unit in row} - {"format"})
    print(f"summary: {len(rows)} formats on {', '.join(units)}; run tools/render_results.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
