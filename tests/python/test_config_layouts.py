"""Layouts of config.json as publishers write them, tests/data/config_layouts.json: `kvanta show` has the right facts.

A layout is `set` and `drop` on `base`, within `outer` as its text_config if that is there; `facts` differ from those of
all, null: there is none. A fact is its value and its place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvanta.checkpoint.facts import model_facts

TABLE = json.loads((Path(__file__).resolve().parents[1] / "data" / "config_layouts.json").read_text())


def config_of(layout: dict[str, Any]) -> dict[str, Any]:
    config = {name: value for name, value in TABLE["base"].items() if name not in layout.get("drop", ())}
    config |= layout["set"]
    return {**layout["outer"], "text_config": config} if "outer" in layout else config


def facts_of(folder: Path, text: str) -> tuple[dict[str, str], list[str]]:
    """Facts by name, and problems other than that there are no weights and no tokenizer."""
    (folder / "config.json").write_text(text)
    result = model_facts(folder)
    facts = {fact.name: " <- ".join(filter(None, (fact.value, fact.source))) for fact in result.facts}
    place = f"{folder}/"
    problems = [each.replace(place, "") for each in result.problems if "weights: no" not in each]
    return (
        {name: fact.replace(place, "") for name, fact in facts.items()},
        [each for each in problems if "has no tokenizer" not in each],
    )


@pytest.mark.parametrize("name", TABLE["layouts"])
def test_facts_of_a_layout(name: str, tmp_path: Path) -> None:
    layout = TABLE["layouts"][name]
    facts, problems = facts_of(tmp_path, json.dumps(config_of(layout)))
    if "problem" in layout:
        assert problems[0].startswith(layout["problem"])
        return
    assert not problems
    shown = {"attention", "context", "dtype", "rope", "window", "chunks", "quantization", "KV cache"}
    expected = {name: fact for name, fact in {**TABLE["facts"], **layout["facts"]}.items() if fact is not None}
    assert {name: fact for name, fact in facts.items() if name in shown} == expected


@pytest.mark.parametrize(
    "added",
    [
        '"time_step_limit": [0.0, Infinity], "router_bias": NaN, "floor": -Infinity,',
        '"hidden_size": 1, "torch_dtype": "half", "rope_theta": 1,',
        '"id2label": {"0": "LABEL_0"}, "task_specific_params": null, "transformers_version": "5.3.0",',
        '"rope_scaling": null, "quantization_config": null, "sliding_window": null, "text_config": null,',
    ],
    ids=["NaN and Infinity", "keys that appear twice", "keys of others", "null"],
)
def test_what_changes_no_fact(added: str, tmp_path: Path) -> None:
    text = json.dumps(TABLE["base"])
    expected = facts_of(tmp_path, text)
    assert facts_of(tmp_path, text.replace("{", "{" + added, 1)) == expected
    assert not expected[1]
