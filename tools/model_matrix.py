#!/usr/bin/env python3
"""Writes the matrix architecture x weights x device from reports of tests that ran.

    pytest tests/python --all-models --junitxml build/logs/pytest.xml
    tools/model_matrix.py build/logs/pytest.xml --kernels build/release/tests/kernels_test
    tools/model_matrix.py build/logs/pytest.xml --check

Tests of models say in the report's properties what their success shows (tests/python/model_support.py); those that
failed or were skipped show nothing. The rows by CPU unit are those of the tests of linear layers in kernels_test.
--check changes nothing and fails if the report shows other cells than docs/results/models.json has. The report must be
of a run with --all-models, except for --check --rotation: there, cells of tests that did not run may be missing.
--inputs lists the files and folders whose change calls for --all-models.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from support_matrix import ROOT, run

PROPERTY = "model_support"
# Columns of the matrix, and how checkpoints in them are stored: names of tests/python/quantized_checkpoints.py, of the
# types of safetensors and GGUF files.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "floats": ("F32", "BF16", "F16"),
    "fp8": (
        *("fp8_blocks", "auto_fp8", "fbgemm_fp8", "ct_fp8_tensor", "ct_fp8_channel", "ct_fp8_blocks"),
        *("modelopt_fp8", "modelopt_fp8_blocks", "quark_fp8", "ct_mxfp8", "modelopt_mxfp8"),
    ),
    "int8": ("ct_int8", "ct_int8_asymmetric", "ct_w8a16", "gptq_8", "bnb_int8"),
    "int4": (
        *("awq", "gptq_2", "gptq_3", "gptq_4", "gptq_4_act_order", "gptq_4_ragged", "gptq_v2"),
        *("ct_w3a16", "ct_w4a16", "ct_w4a16_asymmetric"),
    ),
    "fp4": ("modelopt_nvfp4", "ct_nvfp4", "mxfp4", "ct_mxfp4", "quark_mxfp4"),
    "nf4": ("nf4", "nf4_nested", "bnb_fp4"),
    "gguf_floats": ("GGUF F32", "GGUF F16", "GGUF BF16"),
    "gguf_blocks": (
        *("GGUF Q8_0", "GGUF Q6_K", "GGUF Q5_0", "GGUF Q5_1", "GGUF Q5_K", "GGUF Q4_0", "GGUF Q4_1", "GGUF Q4_K"),
        *("GGUF Q3_K", "GGUF Q2_K", "GGUF IQ4_NL", "GGUF IQ4_XS", "GGUF MXFP4"),
    ),
}
# Files and folders that the cells depend on, without the tests that record them.
INPUTS = (
    *("src", "include", "python/bindings", "tests/emulated", "requirements/oracle.txt", "requirements/constraints.txt"),
    *(
        f"python/kvanta/{name}"
        for name in ("calibration", "checkpoint", "engine", "evaluate", "files", "gguf", "text/tokenizer_files")
    ),
    *("python/kvanta/options/engine.py", "python/kvanta/fleet/plan.py"),
    *(f"python/kvanta/cli/{name}.py" for name in ("calibrate", "eval", "plan", "serve")),
    *(f"tests/python/{name}.py" for name in ("conftest", "logits_oracle", "tolerance", "live_server", "model_support")),
    *(
        f"tests/python/tiny_{name}.py"
        for name in ("checkpoints", "classes", "dense", "gguf", "models", "multimodal", "text_and_images")
    ),
    *("tests/python/quantized_checkpoints.py", "tests/python/quantized_packing.py"),
    *(
        f"tests/python/gguf_{name}.py"
        for name in ("dense", "gemma4", "hybrids", "keys", "kimi", "lfm2", "mamba2", "models", "moe_models")
    ),
)
# The longer names first: one is the beginning of another.
UNITS = (
    *("avx512_emulated", "avx512fp16_emulated", "zen4_emulated", "amx_emulated"),
    *("portable", "avx2", "avx512fp16", "avx512", "zen4", "amx"),
)
LINEAR_TESTS = ("LinearTest", "BlockLinearTest", "QuantizedLinearTest")

Cell = dict[str, str]


def read_cells(report: Path) -> Iterator[Cell]:
    """Cells of the tests that passed."""
    for test in ElementTree.parse(report).iter("testcase"):
        if any(test.find(outcome) is not None for outcome in ("failure", "error", "skipped")):
            continue
        for entry in test.iter("property"):
            if entry.get("name") == PROPERTY:
                yield json.loads(entry.get("value") or "")


def column_of(weights: str) -> str:
    """The column of a way to store weights."""
    for column, members in COLUMNS.items():
        if weights in members:
            return column
    raise SystemExit(f"error: tests of the weights {weights!r}, which are in none of COLUMNS of tools/model_matrix.py")


def architecture_rows(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """A row for each architecture: {"architecture": ..., DEVICE: {COLUMN: "passed" | "refused"}}, and the refusals."""
    rows: dict[str, dict[str, Any]] = {}
    for cell in cells:
        row = rows.setdefault(cell["architecture"], {"architecture": cell["architecture"]})
        device = row.setdefault(cell["device"], {})
        device[column_of(cell["weights"])] = "refused" if "refusal" in cell else "passed"
        if "refusal" in cell:
            row["refusal"] = cell["refusal"]
    return [rows[name] for name in sorted(rows)]


def weight_rows(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """A row for each way to store weights: in how many architectures it passed, by device."""
    found: dict[str, dict[str, set[str]]] = {}
    for cell in cells:
        if "refusal" not in cell:
            devices = found.setdefault(cell["weights"], {})
            devices.setdefault(cell["device"], set()).add(cell["architecture"])
    order = [weights for members in COLUMNS.values() for weights in members]
    return [
        {"weights": name, **{device: len(names) for device, names in sorted(found[name].items())}}
        for name in sorted(found, key=order.index)
    ]


def kernel_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each storage of a linear layer: on which units all of its tests passed, from gtest's JSON."""
    rows: dict[str, dict[str, Any]] = {}
    for suite in report["testsuites"]:
        if suite["name"].rpartition("/")[2] not in LINEAR_TESTS:
            continue
        for test in suite["testsuite"]:
            case = str(test["name"]).rpartition("/")[2]
            unit = next(name for name in UNITS if case.startswith(f"{name}_"))
            storage = case.removeprefix(f"{unit}_")
            row = rows.setdefault(storage, {"storage": storage})
            passed = test["result"] == "COMPLETED" and not test.get("failures")
            row[unit] = "passed" if passed and row.get(unit, "passed") == "passed" else "failed"
    return list(rows.values())


def inputs() -> list[str]:
    """INPUTS, and the tests that have the mark `rotation` or record cells."""
    tests = sorted((ROOT / "tests" / "python").glob("test_*.py"))
    marks = ("mark.rotation(", "record_support")
    found = [file for file in tests if any(mark in file.read_text(encoding="utf-8") for mark in marks)]
    return [*INPUTS, *(file.relative_to(ROOT).as_posix() for file in found)]


def differences(
    key: str, rows: list[dict[str, Any]], stored: list[dict[str, Any]], is_partial: bool
) -> list[tuple[dict[str, Any] | None, dict[str, Any] | None]]:
    """Rows of the tests with those of the file that are others. `is_partial`: tests of some cells did not run."""
    if not is_partial:
        return [(row, old) for row, old in itertools.zip_longest(rows, stored) if row != old]
    name = {"architectures": "architecture", "weights": "weights"}[key]
    known = {old[name]: old for old in stored}
    pairs = [(row, known.get(row[name])) for row in rows]
    return [(row, old) for row, old in pairs if old is None or not _is_part(row, old)]


def _is_part(row: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """True if the file has each cell of the row; of numbers of architectures, as many or more."""
    for field, value in row.items():
        if isinstance(value, Mapping):
            if not value.items() <= old.get(field, {}).items():
                return False
        elif isinstance(value, int):
            if value > old.get(field, 0):
                return False
        elif value != old.get(field):
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, nargs="?", help="of pytest --junitxml")
    parser.add_argument("--kernels", type=Path, metavar="PROGRAM", help="kernels_test; without it, its rows stay")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "results" / "models.json")
    parser.add_argument("--check", action="store_true", help="change nothing, fail if the file has other cells")
    parser.add_argument("--rotation", action="store_true", help="with --check: the run was one without --all-models")
    parser.add_argument("--inputs", action="store_true", help="list what the cells depend on, one path a line")
    options = parser.parse_args()
    if options.inputs:
        print("\n".join(inputs()))
        return 0
    if options.report is None or (options.rotation and not options.check):
        parser.error("a report is needed; --rotation is for --check" if options.report else "a report is needed")
    cells = list(read_cells(options.report))
    shown = {"architectures": architecture_rows(cells), "weights": weight_rows(cells)}
    stored = json.loads(options.json.read_text(encoding="utf-8")) if options.json.is_file() else {}
    if options.check:
        different = 0
        for key, rows in shown.items():
            changed = differences(key, rows, stored.get(key, []), options.rotation)
            different += len(changed)
            for row, old in changed:
                print(f"{options.json.name}: {key} has {json.dumps(old)}; the tests show {json.dumps(row)}")
        print(f"summary: {len(cells)} tests of models, {different} rows of {options.json.name} out of date")
        return 1 if different else 0
    kernels = stored.get("kernels", [])
    if options.kernels:
        kernels = kernel_rows(run(options.kernels, "*/*LinearTest.*"))
    options.json.write_text(json.dumps({**shown, "kernels": kernels}, indent=1) + "\n", encoding="utf-8")
    print(f"summary: {len(cells)} tests of {len(shown['architectures'])} architectures; run tools/render_results.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
