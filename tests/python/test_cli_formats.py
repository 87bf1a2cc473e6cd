"""`kvanta formats`: the table for people and for programs."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from command_line import kvanta

from kvanta import formats


@pytest.mark.parametrize(("columns", "limit"), [("80", 80), ("100", 100), ("400", 110), ("", 100)])
def test_the_table_of_formats_fits(columns: str, limit: int) -> None:
    lines = kvanta("formats", COLUMNS=columns).stdout.splitlines()
    assert 0.7 * limit < max(map(len, lines)) <= limit
    assert re.search(r"mla_fp8 .* 9\.111 ", "\n".join(lines))


def test_descriptions_name_the_pages_that_stay_exact() -> None:
    text = " ".join(kvanta("formats").stdout.split())
    for row in formats.table():
        description = text[text.index(row["summary"]) + len(row["summary"]) :].split("cpu")[0]
        expected = f"open {'and first ' if row['sink_pages'] else ''}page exact"
        assert (expected in row["summary"] + description) == (row["exact"] == "open"), row["name"]


def test_formats() -> None:
    done = kvanta("formats", COLUMNS="400")
    report: dict[str, Any] = json.loads(kvanta("formats", "--json", "-").stdout)
    names = {row["name"]: row for row in report["formats"]}
    for name, row in names.items():
        assert name in done.stdout
        assert row["summary"] in " ".join(done.stdout.split())
    assert names["int8"]["bits_per_element"] == 8.125
    assert re.search(r"int8 .* 8\.125 ", done.stdout), "in full, as README.md and kvanta plan have it"
    assert names["int4"]["bits_per_element"] == 4.5
    assert "fp8" in names["fp8_e4m3"]["aliases"]
    assert "reference" in report["backends"]
    for name, row in names.items():
        assert row["backends"] == ["cpu", "cuda", "reference"]
        assert re.search(rf"^ *{name} .*\d   cpu, cuda$", done.stdout, re.MULTILINE), name
