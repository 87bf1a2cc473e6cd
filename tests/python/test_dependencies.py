"""Dependencies of pyproject.toml: pinned versions are within their bounds, and what is imported is declared."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DECLARED = [Requirement(line) for line in PROJECT["dependencies"]]
OPTIONAL = [Requirement(line) for lines in PROJECT["optional-dependencies"].values() for line in lines]
# Module -> package, where their names differ; starlette comes with fastapi, huggingface_hub with tokenizers.
PACKAGES = {"yaml": "pyyaml", "zmq": "pyzmq", "starlette": "fastapi", "huggingface_hub": "tokenizers"}
PACKAGES |= {"pydantic": "fastapi", "h11": "uvicorn"}


def pinned() -> dict[str, str]:
    lines = (ROOT / "requirements/constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_pinned_versions_are_within_the_bounds() -> None:
    versions = pinned()
    for each in (*DECLARED, *OPTIONAL):
        version = versions[canonicalize_name(each.name)]
        assert each.specifier.contains(version), f"{each}: {version} is pinned"


def test_internals_that_are_extended_have_an_upper_bound() -> None:
    (uvicorn,) = (each for each in OPTIONAL if each.name == "uvicorn")
    assert any(clause.operator == "<" for clause in uvicorn.specifier)


def test_imports_are_declared() -> None:
    declared = {canonicalize_name(each.name) for each in (*DECLARED, *OPTIONAL)}
    for file in (ROOT / "python/kvanta").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(node.module or "")
            for name in {each.partition(".")[0] for each in names} - sys.stdlib_module_names - {"kvanta"}:
                assert canonicalize_name(PACKAGES.get(name, name)) in declared, f"{file}: {name}"
