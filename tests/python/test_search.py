"""kvanta eval --search: candidates of each side, and measurements that are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvanta.evaluate import Evaluation, Settings
from kvanta.evaluate.engine_factory import EngineFactory
from kvanta.evaluate.search import Search

MODEL = "stories260k"
SMALL = Settings(formats=["int8", "fp8"], context=128, tokens=512, engine={"threads": 1})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path))


def test_a_search_measures_again_for_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    make = EngineFactory.engine

    def counted(self: EngineFactory, *arguments: str) -> Any:
        opened.append(arguments[0])
        return make(self, *arguments)

    monkeypatch.setattr(EngineFactory, "engine", counted)
    passages = Evaluation(MODEL, SMALL).calibration_passages(64)

    def engines(weights: str) -> int:
        opened.clear()
        options = {"threads": 1, "weight_dtype": weights}
        Search(EngineFactory.find(MODEL, 64, 1, options, "bf16"), passages, [16.0], ["int8"]).run()
        return len(opened)

    first = engines("bf16")
    assert (engines("bf16"), engines("int8")) == (0, first - 1)  # the reference is the same


def test_modifiers_of_keys_go_to_the_keys_that_take_them() -> None:
    found = Search(
        EngineFactory.find(MODEL, 128, 1, {"threads": 1}),
        Evaluation(MODEL, SMALL).calibration_passages(256),
        [16.0],
        ["int8", "fp8_e4m3"],
        "+exact=2+query+sink=1",
    )
    keys, values = ([choice.name for choice in choices] for choices in found._sides)
    assert keys == ["bf16", "int8+query", "fp8_e4m3"]
    assert values == ["bf16", "int8", "fp8_e4m3"]
    assert found._scheme("int8+query", "int8") == "k=int8+query,v=int8+exact=2+sink=1"
    assert found._scheme("bf16", "bf16") == "bf16"
