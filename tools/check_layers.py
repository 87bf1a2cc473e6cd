#!/usr/bin/env python3
"""Checks that includes point down the layers of src/LAYERS, and imports those of python/kvanta/LAYERS.

    tools/check_layers.py [ROOT]

Rules of Python: a module imports only its own package and lower ones, within functions and for types as well; every
module has a layer; no modules import each other in a circle.

Rules of C++: a file of a layer includes only its own layer and lower ones; a public header (include/kvanta) includes
only public headers of its layer and lower ones; every folder of src and every public header is listed in src/LAYERS;
quoted includes are written from the root of src or include, never relative; CUDA headers are for src/kernels/**/cuda
alone; headers that nvcc compiles do not call std::copy, which copies nothing in device code (nvcc 13.0).
Exit status 1 and one line per violation.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
CUDA_HEADER = re.compile(r"^(cuda|cublas|cudnn|cutlass|cute|cub|thrust|nccl|nvrtc|nvtx)|\.cuh$")
SOURCE_SUFFIXES = {".h", ".cc", ".inc", ".cu", ".cuh"}
CUDA_HOME = re.compile(r"^src/kernels/(\w+/)?cuda/")
DEVICE_CODE = re.compile(r"^src/(formats|kernels/(\w+/)?cuda)/.*\.(h|cu)$")
EXTENSION = "kvanta._core"
GENERATED = ("shipped", "__pycache__")
LOST_COPY = re.compile(r"\bstd::copy(_n)?\(")


@dataclass(frozen=True)
class Layers:
    """The layers, lowest first, and the layer of each public header."""

    rank: dict[str, int]
    public: dict[str, str]

    @staticmethod
    def read(root: Path) -> Layers:
        rank: dict[str, int] = {}
        public: dict[str, str] = {}
        for line in (root / "src/LAYERS").read_text().splitlines():
            layer, *headers = line.split("#")[0].split() or [""]
            if layer:
                rank[layer] = len(rank)
                public |= dict.fromkeys(headers, layer)
        return Layers(rank, public)


def layer_of(path: str, layers: Layers) -> str | None:
    """Layer of a file by its path below the root; None if it has none."""
    if path.startswith("include/"):
        return layers.public.get(path)
    folder = path.split("/")[1] if path.count("/") >= 2 else ""
    return folder if folder in layers.rank else None


def resolve(root: Path, name: str) -> str | None:
    """Path below the root of the file that `#include "name"` means; None if there is none."""
    for base in ("include", "src"):
        if (root / base / name).is_file():
            return f"{base}/{name}"
    return None


def check_include(root: Path, path: str, quote: str, name: str, layers: Layers) -> str | None:
    """Describes the violation of one include of `path`; None if there is none."""
    if CUDA_HEADER.search(name) and not CUDA_HOME.match(path):
        return f"includes the CUDA header {name}; only src/kernels/**/cuda may"
    if quote == "<":
        return f'write #include "{name}" for the project\'s own header' if name.startswith("kvanta/") else None
    target = resolve(root, name)
    if target is None:
        return f'#include "{name}" names no file below src or include'
    own, other = layer_of(path, layers), layer_of(target, layers)
    if own is None or other is None:
        return None  # reported once, by check_files
    if path.startswith("include/") and not target.startswith("include/"):
        return f"a public header includes the private {name}"
    if layers.rank[other] > layers.rank[own]:
        return f"layer '{own}' includes {name} of the higher layer '{other}'"
    return None


def check(root: Path) -> tuple[int, list[str]]:
    """Returns the number of files, and the violations as `path:line: text`."""
    layers = Layers.read(root)
    problems = [f"src/LAYERS: {header} does not exist" for header in layers.public if not (root / header).is_file()]
    files = sorted(p for base in ("include", "src") for p in (root / base).rglob("*") if p.suffix in SOURCE_SUFFIXES)
    for file in files:
        path = file.relative_to(root).as_posix()
        if layer_of(path, layers) is None:
            problems.append(f"{path}: has no layer; name its folder or the public header in src/LAYERS")
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if found := INCLUDE.match(line):
                problem = check_include(root, path, found[1], found[2], layers)
                if problem:
                    problems.append(f"{path}:{number}: {problem}")
            if DEVICE_CODE.match(path) and LOST_COPY.search(line.split("//")[0]):
                problems.append(f"{path}:{number}: std::copy copies nothing in device code; write a loop")
    return len(files), problems


def imported(file: Path, modules: Collection[str]) -> Iterator[tuple[int, str]]:
    """Line and name of every module of the package that a file imports; `modules`: all names."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            package = node.module or ""
            names = {f"{package}.{alias.name}" for alias in node.names}
            yield from ((node.lineno, name) for name in {name if name in modules else package for name in names})


def circle(edges: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules that import each other, one after the other; empty if there are none."""
    done: set[str] = set()
    for start in edges:
        path, stack = [start], [iter(edges[start])]
        while stack and start not in done:
            name = next(stack[-1], "")
            if name in path:
                return [*path[path.index(name) :], name]
            if not name:
                done.add(path.pop())
                stack.pop()
            elif name not in done:
                path.append(name)
                stack.append(iter(edges.get(name, ())))
    return []


def check_python(root: Path) -> tuple[int, list[str]]:
    """The same for the Python package."""
    package = root / "python/kvanta"
    lines = [line.split("#")[0].split() for line in (package / "LAYERS").read_text().splitlines()]
    rank = {words[0].replace("/", "."): place for place, words in enumerate(filter(None, lines))}
    problems = [
        f"python/kvanta/LAYERS: {name} does not exist"
        for name in rank
        if not any((package / (name.replace(".", "/") + end)).exists() for end in (".py", "/__init__.py"))
    ]
    modules: dict[str, Path] = {}
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        if path.parts[0] not in GENERATED:
            parts = path.parts[:-1] if path.name == "__init__.py" else (*path.parts[:-1], path.stem)
            modules[".".join(("kvanta", *parts))] = file

    def layer(module: str) -> str | None:
        """The most precise line of LAYERS."""
        name = module.partition(".")[2] or "__init__"
        while name and name not in rank:
            name = name.rpartition(".")[0]
        return name or None

    edges: dict[str, set[str]] = {}
    for module, file in modules.items():
        own, path = layer(module), file.relative_to(root)
        if own is None:
            problems.append(f"{path}: has no layer; name its package in python/kvanta/LAYERS")
            continue
        for number, name in imported(file, {*modules, EXTENSION}):
            other = layer(name) if name in modules else None
            if other is None or name == module:
                continue
            edges.setdefault(module, set()).add(name)
            if rank[other] > rank[own]:
                problems.append(f"{path}:{number}: layer '{own}' imports {name} of the higher layer '{other}'")
    if names := circle(edges):
        problems.append(f"python/kvanta: modules import each other: {' -> '.join(names)}")
    return len(modules), problems


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)
    count, problems = check(root)
    modules, python_problems = check_python(root)
    count, problems = count + modules, problems + python_problems
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"summary: {count} files, {len(problems)} includes or files out of place")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
