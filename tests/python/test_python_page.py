"""docs/python.md against the package: names, signatures, defaults, and the errors' bases."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import kvanta
from kvanta import LLM

PAGE = (Path(__file__).resolve().parents[2] / "docs/python.md").read_text()
COMPATIBILITY = {"lora_request", "tokenization_kwargs", "mm_processor_kwargs"}  # the page leaves them out
OWNERS: dict[str, Any] = {"LLM": LLM, "attention": kvanta.attention, "formats": kvanta.formats}
SIGNATURE = re.compile(r"^(?:(LLM|attention|formats)\.)?(\w+)(\(.*\))(?: -> .*)?$")


def signatures() -> dict[tuple[str, str], ast.arguments]:
    """(owner, name) -> arguments of every signature in the page's code blocks."""
    found = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        for line in block.splitlines():
            match = SIGNATURE.match(line)
            if match and (match[1] or match[2] == "LLM"):
                (function,) = ast.parse(f"def f{match[3]}: ...").body
                assert isinstance(function, ast.FunctionDef)
                found[match[1] or "", match[2]] = function.args
    return found


def described(arguments: ast.arguments) -> dict[str, tuple[str, object]]:
    """Name -> kind and default, as in an inspected signature."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    entries = [*zip(plain, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    kinds = ["POSITIONAL_ONLY"] * len(arguments.posonlyargs) + ["POSITIONAL_OR_KEYWORD"] * len(arguments.args)
    kinds += ["KEYWORD_ONLY"] * len(arguments.kwonlyargs)
    none = inspect.Parameter.empty
    found = {
        argument.arg: (kind, none if default is None else ast.literal_eval(default))
        for (argument, default), kind in zip(entries, kinds, strict=True)
    }
    if arguments.kwarg:
        found[arguments.kwarg.arg] = ("VAR_KEYWORD", none)
    return found


def actual(function: Any) -> dict[str, tuple[str, object]]:
    return {
        name: (each.kind.name, each.default)
        for name, each in inspect.signature(function).parameters.items()
        if name not in COMPATIBILITY and name != "self"
    }


@pytest.mark.parametrize(("owner", "name"), sorted(key for key in signatures() if key[0]))
def test_signatures_are_the_real_ones(owner: str, name: str) -> None:
    real, page = actual(getattr(OWNERS[owner], name)), described(signatures()[owner, name])
    for argument, (kind, default) in page.items():
        if default is ...:  # the page gives no value of the default
            assert real[argument][1] is not inspect.Parameter.empty
            real[argument] = (kind, default)
    assert page == real
    assert list(page) == list(real)


def test_the_constructor_has_these_arguments() -> None:
    page = described(signatures()["", "LLM"])
    assert page.pop("options") == ("VAR_KEYWORD", inspect.Parameter.empty)
    real = actual(LLM)
    assert {name: real[name] for name in page} == page
    listed = set(re.findall(r"`(\w+)`", PAGE.split("<!-- reference:llm-options -->")[1].split("<!-- /reference")[0]))
    assert listed == set(real) - set(page) - {"options"}


def test_every_public_name_has_its_place() -> None:
    methods = {name for name, value in inspect.getmembers(LLM, inspect.isfunction) if not name.startswith("_")}
    assert methods == {name for owner, name in signatures() if owner == "LLM"}
    assert all(f"`LLM.{name}`" in PAGE for name, _ in inspect.getmembers(LLM, lambda each: isinstance(each, property)))
    for module in ("attention", "formats"):
        public = {
            name
            for name, value in inspect.getmembers(OWNERS[module], inspect.isfunction)
            if not name.startswith("_") and value.__module__ == f"kvanta.{module}"
        }
        assert public == {name for owner, name in signatures() if owner == module}
    for name in kvanta.__all__:
        described_as = (f"`{name}`", f"### {name}\n", f"## {name}\n", f"kvanta.{name}")
        assert any(place in PAGE for place in described_as), name


def test_no_name_is_missing_from_the_package() -> None:
    for owner, name in re.findall(r"`(LLM|attention|formats|SamplingParams)\.(\w+)", PAGE):
        assert hasattr(OWNERS.get(owner, getattr(kvanta, owner)), name) or name in ("model", "tokenizer"), name
    for name in re.findall(r"^### ([A-Z]\w+(?:[A-Z]\w+)+)$", PAGE, re.MULTILINE):
        assert name in kvanta.__all__
    assert {*re.findall(r"`(\w+Error)`", PAGE)} - {"ValueError"} == {
        name for name in kvanta.__all__ if name.endswith("Error")
    }


def test_the_errors_have_the_bases_of_the_table() -> None:
    rows = re.findall(r"^\| `(\w+Error)` \| (.*?) \|", PAGE, re.MULTILINE)
    assert len(rows) == 5
    for name, bases in rows:
        assert [base.__name__ for base in getattr(kvanta, name).__bases__] == re.findall(r"`(\w+)`", bases)


def test_stats_and_statistics_have_the_described_keys(llm: LLM) -> None:
    stats = llm.stats()
    text = PAGE.split("`stats` returns")[1].split("`measure_quality`")[0]
    assert {*re.findall(r"`(\w+)`", text)} <= stats.keys()
    assert {"requests", "tokens", "kl_mean", "kl_max"} <= llm.measure_quality().keys()
    statistics = llm.kv_statistics([1, 403, 407])
    table = PAGE.split("LLM.kv_statistics")[1].split("LLM.query_moments")[0]
    assert {*re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))} == statistics.keys()
    layers = statistics["amax"].shape[0]
    assert statistics["histogram"].shape == (layers, 2, llm.model_info.kv_heads, len(statistics["edges"]) - 1)
    moments = llm.query_moments(list(range(1, 130)))
    text = PAGE.split("Second moments")[1].split("`context_lengths`")[0]
    assert {*re.findall(r"`(\w+)`", text)} - {"weighted", "kvanta calibrate"} == moments.keys()
    for attribute in re.findall(r"`(\w+)`", re.search(r"`LLM.model_info` \| (.*) \|", PAGE)[1]):  # type: ignore[index]
        assert hasattr(llm.model_info, attribute)
