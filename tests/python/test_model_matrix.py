"""The matrix of models in docs/support.md: complete, and made of tests that passed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import model_matrix
import pytest
import quantized_checkpoints as layouts
from model_matrix import architecture_rows, column_of, differences, kernel_rows, read_cells, weight_rows
from model_support import PROPERTY, recorder
from support_matrix import ROOT

from kvanta import _core
from kvanta.checkpoint.resolve import SHIPPED


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((ROOT / "docs/results/models.json").read_text(encoding="utf-8"))
    return result


def test_every_architecture_was_tested_on_every_device(stored: dict[str, Any]) -> None:
    rows = {row["architecture"]: row for row in stored["architectures"]}
    assert sorted(rows) == sorted(_core.architectures()), "run tools/model_matrix.py"
    for name, row in rows.items():
        assert row["cpu"]["floats"] == "passed", name
        assert row["gpu_emulated"]["floats"] == ("refused" if "refusal" in row else "passed"), name


def test_every_way_to_store_weights_was_tested(stored: dict[str, Any]) -> None:
    tested = {row["weights"] for row in stored["weights"] if row["cpu"] > 0}
    # NVFP4 tensors of GGUF also have tensor scales, which no architecture has names for.
    blocks = {f"GGUF {kind}" for kind in _core.gguf_types() if kind != "NVFP4"}
    assert tested == {"F32", "BF16", "F16", "mxfp4"} | layouts.LAYOUTS.keys() | blocks


def test_every_unit_passed(stored: dict[str, Any]) -> None:
    storages = {row["storage"] for row in stored["kernels"]}
    assert set(_core.gguf_types()) - {"F32", "F16", "BF16"} <= storages
    for row in stored["kernels"]:
        assert {"portable", "avx2"} < row.keys()
        assert set(row.values()) == {row["storage"], "passed"}


def test_what_a_test_records_is_read_if_it_passed(tmp_path: Path) -> None:
    properties: list[tuple[str, object]] = []
    record = recorder(properties)
    record(SHIPPED / "stories260k", "awq")
    record(SHIPPED / "stories260k", "F32", "gpu_emulated", "no such experts")
    entries = "".join(f"<property name='{name}' value='{value}'/>" for name, value in properties)
    cases = "".join(
        f"<testcase><properties>{entries.replace('awq', weights)}</properties>{outcome}</testcase>"
        for weights, outcome in (("awq", ""), ("nf4", "<failure/>"), ("Q4", "<skipped/>"), ("gptq_4", "<error/>"))
    )
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    cells = list(read_cells(tmp_path / "report.xml"))
    assert [name for name, _ in properties] == [PROPERTY] * 2 == [model_matrix.PROPERTY] * 2
    assert architecture_rows(cells) == [
        {
            "architecture": "LlamaForCausalLM",
            "cpu": {"int4": "passed"},
            "gpu_emulated": {"floats": "refused"},
            "refusal": "no such experts",
        }
    ]
    assert weight_rows(cells) == [{"weights": "awq", "cpu": 1}]


STORED = [
    {"architecture": "A", "cpu": {"floats": "passed", "fp8": "passed"}, "gpu_emulated": {"floats": "refused"}},
    {"architecture": "B", "cpu": {"floats": "passed"}},
]


@pytest.mark.parametrize(
    ("row", "is_known"),
    [
        ({"architecture": "B", "cpu": {"floats": "passed"}}, True),
        ({"architecture": "A", "cpu": {"fp8": "passed"}}, True),
        ({"architecture": "A", "gpu_emulated": {"floats": "passed"}}, False),
        ({"architecture": "A", "cpu": {"fp8": "refused"}}, False),
        ({"architecture": "A", "cpu": {"int4": "passed"}}, False),
        ({"architecture": "A", "cpu": {}, "refusal": "no such layers"}, False),
        ({"architecture": "C", "cpu": {"floats": "passed"}}, False),
    ],
)
def test_a_run_in_rotation_may_lack_cells_but_has_no_others(row: dict[str, Any], is_known: bool) -> None:
    assert (differences("architectures", [row], STORED, is_partial=True) == []) == is_known
    assert differences("architectures", [row, STORED[1]], STORED, is_partial=False) != []
    assert differences("architectures", STORED, STORED, is_partial=False) == []


@pytest.mark.parametrize(("count", "is_known"), [(2, True), (3, True), (4, False)])
def test_a_run_in_rotation_shows_no_more_architectures(count: int, is_known: bool) -> None:
    stored = [{"weights": "awq", "cpu": 3}]
    assert (differences("weights", [{"weights": "awq", "cpu": count}], stored, is_partial=True) == []) == is_known


def test_the_command_checks_a_part_or_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: Any) -> None:
    cell = {"architecture": "LlamaForCausalLM", "weights": "awq", "device": "cpu"}
    report = tmp_path / "report.xml"
    properties = f"<properties><property name='{PROPERTY}' value='{json.dumps(cell)}'/></properties>"
    report.write_text(f"<testsuite><testcase>{properties}</testcase></testsuite>")
    for words, status in ((["--rotation"], 0), ([], 1)):
        monkeypatch.setattr("sys.argv", ["model_matrix.py", str(report), "--check", *words])
        assert model_matrix.main() == status


def test_inputs_exist_and_hold_the_tests_in_rotation() -> None:
    paths = model_matrix.inputs()
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert {"tests/python/test_quantized_architectures.py", "tests/python/test_config_defaults.py"} <= set(paths)


def test_new_weights_need_a_column() -> None:
    assert column_of("GGUF Q4_K") == "gguf_blocks"
    with pytest.raises(SystemExit, match="tests of the weights 'awq_2', which are in none of COLUMNS"):
        column_of("awq_2")


def test_one_failure_spoils_a_unit() -> None:
    tests = [
        {"name": "RowsHave/avx512_emulated_Q4_K", "result": "COMPLETED"},
        {"name": "Extreme/avx512_emulated_Q4_K", "result": "COMPLETED", "failures": [{}]},
        {"name": "Third/avx512_emulated_Q4_K", "result": "COMPLETED"},
        {"name": "RowsHave/avx512_Q4_K", "result": "COMPLETED"},
    ]
    suites = [{"name": "Units/BlockLinearTest", "testsuite": tests}, {"name": "Units/Other", "testsuite": [{}]}]
    assert kernel_rows({"testsuites": suites}) == [{"storage": "Q4_K", "avx512_emulated": "failed", "avx512": "passed"}]
