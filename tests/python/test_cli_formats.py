"""`kvanta formats`: the table for people and for programs."""

from __future__ import annotations

import json
import re
from typing import Any

from command_line import kvanta


def test_the_table_of_formats_fits_the_terminal() -> None:
    lines = kvanta("formats", COLUMNS="100").stdout.split("\n\n")[0].splitlines()
    assert max(map(len, lines)) <= 100
    whole = kvanta("formats", COLUMNS="400").stdout.split("\n\n")[0].splitlines()
    assert len(whole) < len(lines)
    assert " ".join(lines[2:4][0].split()[:1]) == whole[2].split()[0]
    assert re.search(r"mla_fp8 .* 9\.111 ", "\n".join(whole))


def test_formats() -> None:
    done = kvanta("formats", COLUMNS="400")
    report: dict[str, Any] = json.loads(kvanta("formats", "--json", "-").stdout)
    names = {row["name"]: row for row in report["formats"]}
    for name, row in names.items():
        assert name in done.stdout
        assert row["summary"] in done.stdout
    assert names["int8"]["bits_per_element"] == 8.125
    assert re.search(r"int8 .* 8\.125 ", done.stdout), "in full, as README.md and kvanta plan have it"
    assert names["int4"]["bits_per_element"] == 4.5
    assert "fp8" in names["fp8_e4m3"]["aliases"]
    assert "reference" in report["backends"]
    on_cpus = {"t4", "t3", "t2", "klt3", "klt2"}  # trellis codes
    for name, row in names.items():
        devices = ["cpu"] if name in on_cpus else ["cpu", "cuda"]
        assert row["backends"] == [*devices, "reference"]
        assert re.search(rf"^ *{name} .*\d   {', '.join(devices)}   ", done.stdout, re.MULTILINE), name
