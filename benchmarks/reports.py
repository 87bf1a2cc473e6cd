"""Reports that benchmarks write piece by piece: settings, and rows that stay while other ones are measured again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def earlier_rows(file: Path | None, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier report of exactly these settings; none if there is no such file."""
    if file is None or not file.is_file():
        return []
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = report.pop("rows")
    return rows if report == settings else []
