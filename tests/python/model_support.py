"""Cells of the matrix architecture x weights x device (docs/support.md), as properties of the tests that fill them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

from kvanta.checkpoint.resolve import resolve_model

PROPERTY = "model_support"


class RecordSupport(Protocol):
    """Says in the report of a test (pytest --junitxml) what its success shows; tools/model_matrix.py reads it."""

    def __call__(self, model: Path, weights: str, device: str = "cpu", refusal: str = "") -> None:
        """`model`: a folder or a GGUF file. `weights`: how they are stored. `refusal`: the message of an error."""


def recorder(properties: list[tuple[str, object]]) -> RecordSupport:
    """For the properties of a test."""

    def record(model: Path, weights: str, device: str = "cpu", refusal: str = "") -> None:
        config = json.loads((resolve_model(model).path / "config.json").read_text())
        cell = {"architecture": config["architectures"][0], "weights": weights, "device": device}
        properties.append((PROPERTY, json.dumps(cell | ({"refusal": refusal} if refusal else {}))))

    return record
