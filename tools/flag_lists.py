#!/usr/bin/env python3
"""Writes the list of another engine's command-line options, from its wheel; nothing of the wheel is run.

    pip download --no-deps vllm==0.33.0 && tools/flag_lists.py vllm-0.33.0-*.whl > tools/data/vllm_flags.txt

Each line has an option's flags, separated by spaces, then `=` if it takes a value, `=+` if several.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Sources with add_argument, and those with classes whose fields are options, by the distribution's name.
_CALLS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm/engine/arg_utils.py", "vllm/entrypoints/common/cli_args.py"),
    "aphrodite_engine": ("aphrodite/engine/arg_utils.py", "aphrodite/entrypoints/launchers/cli_args.py"),
    "sglang": ("sglang/srt/server_args.py",),
}
_FIELDS: Mapping[str, str] = {
    "vllm": r"vllm/(config/\w+|engine/arg_utils|entrypoints/common/cli_args)\.py",
    "aphrodite_engine": r"aphrodite/(config/\w+|engine/arg_utils|entrypoints/launchers/cli_args)\.py",
    "sglang": r"sglang/srt/arg_groups/fields/\w+\.py",
}
_FRONT_CLASSES = ("BaseFrontendArgs", "FrontendArgs")  # every field of theirs is an option


@dataclass
class Flags:
    """Options by their first flag."""

    found: dict[str, tuple[list[str], str]] = field(default_factory=dict)

    def add(self, names: list[str], value: str) -> None:
        """Adds an option, unless it is there. `value`: empty, "=" or "=+"."""
        names = sorted({name.replace("_", "-") for name in names}, key=lambda name: (not name.startswith("--"), name))
        self.found.setdefault(names[0], (names, value))

    def lines(self) -> Iterator[str]:
        """The list."""
        for first in sorted(self.found):
            names, value = self.found[first]
            yield " ".join([*names, *([value] if value else [])])


def value_of(annotation: str) -> str:
    """The value of an option, from its field's type: empty, "=" or "=+"."""
    if re.fullmatch(r"(Optional\[)?bool\]?( \| None)?", annotation.strip()):
        return ""
    return "=+" if re.match(r"(Optional\[)?(list|List|tuple|set)\[", annotation.strip()) else "="


def read_fields(trees: list[ast.Module]) -> dict[str, str]:
    """Types of the fields of every class, by name."""
    return {
        each.target.id: ast.unparse(each.annotation)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def add_calls(flags: Flags, tree: ast.Module, fields: Mapping[str, str]) -> None:
    """Adds every add_argument("--x", ...). A field of the name tells the type where the call does not."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr != "add_argument":
            continue
        texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        names = [text for text in texts if text.startswith("-")]
        if not names:
            continue
        given = {each.arg: ast.unparse(each.value) for each in node.keywords if each.arg}
        inherited = [ast.unparse(each.value) for each in node.keywords if each.arg is None]
        if "action" in given:
            value = "" if re.search("[sS]tore_?[tT]rue|Boolean", given["action"]) else "="
        else:
            key = re.search(r"\[['\"](\w+)['\"]\]", inherited[0]) if inherited else None
            value = "=+" if "nargs" in given else value_of(fields.get(key[1], "str")) if key else "="
        flags.add(names, value)


def add_front_classes(flags: Flags, tree: ast.Module) -> None:
    """Adds every field of vLLM's classes of the front."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in _FRONT_CLASSES:
            for name, annotation in read_fields([ast.Module([node], [])]).items():
                flags.add([f"--{name}"], value_of(annotation))


def add_annotated(flags: Flags, tree: ast.Module) -> None:
    """Adds the fields of SGLang's classes: A[type, "help"] or A[type, Arg(...)]."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        annotation = node.annotation
        if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "A"):
            continue
        assert isinstance(annotation.slice, ast.Tuple)
        kind, *rest = annotation.slice.elts
        call = next((each for each in rest if isinstance(each, ast.Call)), None)
        given = {each.arg: each.value for each in call.keywords} if call else {}
        if "no_cli" in given and ast.unparse(given["no_cli"]) == "True":
            continue
        first = given.get("cli_name")
        names = [str(first.value) if isinstance(first, ast.Constant) else f"--{node.target.id}"]
        names += ast.literal_eval(given["aliases"]) if "aliases" in given else []
        action = ast.unparse(given["action"]) if "action" in given else ""
        value = value_of(ast.unparse(kind))
        if any(each in action for each in ("store_true", "StoreTrue", "Boolean")):
            value = ""
        elif "type_parser" in given:
            value = "="
        flags.add(names, "=+" if "nargs" in given else value)


def read_wheel(wheel: Path) -> Flags:
    """Every option of the engine."""
    name = wheel.name.split("-")[0]
    if name not in _CALLS:
        raise SystemExit(f"error: {wheel.name} is none of {', '.join(_CALLS)}")
    with zipfile.ZipFile(wheel) as archive:
        sources = {
            each: ast.parse(archive.read(each))
            for each in archive.namelist()
            if each in _CALLS[name] or re.fullmatch(_FIELDS[name], each)
        }
    flags = Flags()
    fields = read_fields([tree for path, tree in sources.items() if re.fullmatch(_FIELDS[name], path)])
    for path in _CALLS[name]:
        add_calls(flags, sources[path], fields)
        add_front_classes(flags, sources[path])
    if name == "sglang":
        for path, tree in sources.items():
            if re.fullmatch(_FIELDS[name], path):
                add_annotated(flags, tree)
    return flags


def main() -> None:
    """Writes the list to the standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    sys.stdout.writelines(f"{line}\n" for line in read_wheel(parser.parse_args().wheel).lines())


if __name__ == "__main__":
    main()
