"""The checked-in golden vectors are what their maker makes: neither was edited without the other."""

from __future__ import annotations

from pathlib import Path

import make_format_golden
import pytest

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return make_format_golden.files()


def test_files_are_those_of_the_maker(files: dict[str, str]) -> None:
    assert {path.name for path in GOLDEN.glob("*.json")} == set(files)
    for name, text in files.items():
        assert (GOLDEN / name).read_text() == text, f"{name}: run tests/oracle/make_format_golden.py"
