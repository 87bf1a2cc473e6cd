"""docs/reference.md and docs/python.md are what tools/reference.py makes; every environment variable has its row."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import reference

ROOT = Path(__file__).resolve().parents[2]
_READ = re.compile(r"getenv\(\"(\w+)\"|environ(?:\.get|\.pop|\.setdefault)?[\[(]\s*f?\"(\w+)\"|\$\{?(KVANTA_\w+)")
_CONSTANTS = re.compile(r"^_?[A-Z_]+ = \"(KVANTA_\w+)\"", re.MULTILINE)


@pytest.mark.parametrize("page", reference.PAGES)
def test_the_page_is_current(page: str) -> None:
    text = (ROOT / page).read_text()
    assert reference.render(text) == text, f"run tools/reference.py: {page} is out of date"


def test_every_command_and_common_option_is_in_the_reference() -> None:
    text = (ROOT / "docs/reference.md").read_text()
    for name, _, parser in reference.parsers():
        assert f"### kvanta {name}\n" in text
        for section in parser.reference():
            for action in section.actions:
                assert all(flag in text for flag in action.option_strings), action.option_strings


def variables() -> set[str]:
    """Names of environment variables that the sources read."""
    listed = subprocess.run(
        ["git", "ls-files", "--", "src", "python", "bench", "scripts", "tests", "benchmarks", "Containerfile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = set()
    for name in listed.stdout.split():
        if Path(name).suffix in (".py", ".cc", ".h", ".cu", ".sh", "") and name != "tests/python/test_reference.py":
            text = (ROOT / name).read_text(errors="replace")
            found |= {next(filter(None, groups)) for groups in _READ.findall(text)}
            if "environ" in text:
                found |= set(_CONSTANTS.findall(text))
    return found


def test_every_environment_variable_has_its_row() -> None:
    table = (ROOT / "docs/reference.md").read_text().split("## Environment variables")[1]
    rows = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    read = variables()
    assert {"KVANTA_ISA", "KVANTA_HOME", "KVANTA_DEBUG", "KVANTA_SMOLLM2_WHEEL", "KVANTA_CLUSTER_KEY"} <= read
    ours = {name for name in read if name.startswith("KVANTA_")}
    assert ours - rows == set()
    assert {name for name in rows if name.startswith("KVANTA_")} - ours == set()
