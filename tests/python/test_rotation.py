"""The mark `rotation` and the order of files, as tests/python/conftest.py gives them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TESTS = """
import pytest

@pytest.mark.rotation("model", 3, "layout")
@pytest.mark.parametrize("layout", ["x", "y", "z"])
@pytest.mark.parametrize("model", list("abcdefg"))
def test_layouts(model, layout): pass

@pytest.fixture(params=list("abcdefg"))
def folder(request): return request.param

@pytest.mark.rotation("folder", 3, 1)
def test_command(folder): pass

@pytest.mark.parametrize("name", ["p", *(pytest.param(n, marks=pytest.mark.rotation("name", 2, 0)) for n in "qrst")])
def test_names(name): pass
"""


def collected(folder: Path, *options: str) -> list[str]:
    """Names of tests in their order."""
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [*command, *options, "."], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.replace("test_some.py::", "") for line in done.stdout.splitlines() if "::" in line]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_some.py").write_text(TESTS)
    return tmp_path


def test_every_value_has_its_turn(folder: Path) -> None:
    (folder / "test_replicas.py").write_text("def test_slow(): pass")
    assert collected(folder) == [
        "test_replicas.py::test_slow",
        *(f"test_layouts[{pair}]" for pair in ("a-x", "b-y", "c-z", "d-x", "e-y", "f-z", "g-x")),
        *(f"test_command[{name}]" for name in "be"),
        *(f"test_names[{name}]" for name in "pqs"),
    ]


def test_the_next_turn_has_others(folder: Path) -> None:
    assert collected(folder, "--turn", "1") == [
        *(f"test_layouts[{pair}]" for pair in ("a-z", "b-x", "c-y", "d-z", "e-x", "f-y", "g-z")),
        *(f"test_command[{name}]" for name in "cf"),
        *(f"test_names[{name}]" for name in "prt"),
    ]


def test_all_models_are_all_tests(folder: Path) -> None:
    assert len(collected(folder, "--all-models")) == 21 + 7 + 5
