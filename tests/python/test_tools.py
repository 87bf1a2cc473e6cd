"""The checkers of tools/ find what they are for: a violation is put into a copy of a small tree, and they must fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def run(tool: str, *arguments: str | Path) -> tuple[int, str]:
    command = [sys.executable, TOOLS / tool, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree without violations: two layers, a public header of each."""
    write(tmp_path, "src/LAYERS", "# low\nbase include/kvanta/error.h\nkernels\nengine include/kvanta/engine.h\n")
    write(tmp_path, "include/kvanta/error.h", "#include <string>\n")
    write(tmp_path, "include/kvanta/engine.h", '#include "kvanta/error.h"\n')
    write(tmp_path, "src/base/text.h", "")
    write(tmp_path, "src/kernels/cuda/device.cc", "#include <cuda_runtime.h>\n")
    write(tmp_path, "src/engine/loop.cc", '#include "kvanta/engine.h"\n#include "base/text.h"\n')
    return tmp_path


def test_layers_accepts_a_clean_tree(tree: Path) -> None:
    assert run("check_layers.py", tree)[0] == 0


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("src/base/text.cc", '#include "engine/loop.h"\n', "names no file"),
        ("src/base/text.cc", '#include "kvanta/engine.h"\n', "'base' includes kvanta/engine.h of the higher layer"),
        ("src/base/text.cc", '  #  include "kernels/x.h"\n', "higher layer 'kernels'"),
        ("src/engine/gpu.cc", "#include <cublasLt.h>\n", "CUDA header cublasLt.h"),
        ("src/engine/gpu.cc", '#include "../base/text.h"\n', "names no file"),
        ("src/engine/gpu.cc", "#include <kvanta/engine.h>\n", "project's own header"),
        ("include/kvanta/engine.h", '#include "base/text.h"\n', "public header includes the private base/text.h"),
        ("include/kvanta/extra.h", "", "has no layer"),
        ("src/utils/text.h", "", "has no layer"),
    ],
)
def test_layers_finds(tree: Path, path: str, text: str, message: str) -> None:
    write(tree, "src/kernels/x.h", "")
    write(tree, path, text)
    status, output = run("check_layers.py", tree)
    assert status == 1
    assert path in output
    assert message in output


def test_layers_finds_a_missing_public_header(tree: Path) -> None:
    (tree / "include/kvanta/engine.h").unlink()
    status, output = run("check_layers.py", tree)
    assert status == 1
    assert "include/kvanta/engine.h does not exist" in output


@pytest.mark.parametrize(
    ("lines", "status", "message"), [(400, 0, "longest 400"), (401, 0, "warning: src/a.cc"), (801, 1, "error")]
)
def test_sizes(tmp_path: Path, lines: int, status: int, message: str) -> None:
    write(tmp_path, "src/a.cc", "int x;\n" * lines)
    found, output = run("check_sizes.py", tmp_path)
    assert found == status
    assert message in output


def test_sizes_looks_at_scripts_without_a_suffix_but_not_at_data(tmp_path: Path) -> None:
    write(tmp_path, "scripts/long", "#!/bin/sh\n" + "true\n" * 900)
    assert run("check_sizes.py", tmp_path)[0] == 1
    write(tmp_path, "scripts/long", "true\n" * 900)
    assert run("check_sizes.py", tmp_path)[0] == 0


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A README with an empty block, and the result file that belongs there."""
    row = {"format": "int8", "bits_per_element": 8.25, "bytes_per_token": 12345.0, "tokens_in_1_gib": 86978}
    row |= {"equal_top_tokens": 0.99, "mean_kl": 0.0003}
    write(tmp_path, "docs/results/demo.json", json.dumps({"formats": [row]}))
    write(tmp_path, "README.md", "before\n<!-- results:demo -->\n<!-- /results -->\nafter\n")
    return tmp_path


def test_results_fill_a_block_and_notice_a_changed_figure(page: Path) -> None:
    assert run("render_results.py", "--check", page)[0] == 1
    assert run("render_results.py", page)[0] == 0
    assert run("render_results.py", "--check", page)[0] == 0
    text = (page / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| 12,345 " in text
    (page / "README.md").write_text(text.replace("12,345", "12,346"))
    status, output = run("render_results.py", "--check", page)
    assert status == 1
    assert "README.md: out of date" in output


def test_results_that_are_kept_by_name(page: Path) -> None:
    row = dict.fromkeys(("bits_per_element", "bytes_per_token", "kl_mean", "kl_median", "kl_p99", "kl_max"), 1.5)
    row |= {"top1": 0.5, "ppl_ratio": 1.0, "saturated": 0}
    write(page, "docs/results/eval.json", json.dumps({"formats": {"int8": row, "int4": row}}))
    write(page, "docs/eval.md", "<!-- results:eval -->\n<!-- /results -->\n")
    assert run("render_results.py", page)[0] == 0
    text = (page / "docs/eval.md").read_text()
    assert text.index("| int8 ") < text.index("| int4 ")


def test_results_that_are_not_there_yet(page: Path) -> None:
    rows = [{"format": "int8", "avx2": {"decode": 0.5, "prefill": 0.25}}, {"format": "int4", "avx2": {"decode": 0.1}}]
    write(page, "docs/results/support.json", json.dumps({"rows": rows}))
    write(page, "docs/support.md", "<!-- results:support -->\n<!-- /results -->\n")
    assert run("render_results.py", page)[0] == 0
    table = [line for line in (page / "docs/support.md").read_text().splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in table[0].split("|")] == ["", "cache", "avx2, decode", "avx2, prefill", ""]
    assert [cell.strip() for cell in table[2].split("|")] == ["", "int8", "50.00%", "25.00%", ""]
    assert [cell.strip() for cell in table[3].split("|")] == ["", "int4", "10.00%", "-", ""]


def test_results_refuse_a_block_without_a_file(page: Path) -> None:
    (page / "docs/results/demo.json").unlink()
    status, output = run("render_results.py", "--check", page)
    assert status == 1
    assert "docs/results/demo.json" in output
