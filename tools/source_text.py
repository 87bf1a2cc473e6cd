"""Code and comments of C++ and Python sources, taken apart for the checkers of names and prose."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CPP_SUFFIXES = {".h", ".cc", ".inc", ".cu", ".cuh"}
PYTHON_SUFFIXES = {".py", ".pyi"}
_STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}  # the latter from Python 3.12 on
_CPP_TOKEN = re.compile(
    r'(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<string>R"(?P<mark>\w*)\(.*?\)(?P=mark)"|"(?:[^"\\\n]|\\.)*")'
    r"|'(?:[^'\\\n]|\\.)+'|#\s*include[^\n]*|\b(?:TYPED_)?TEST(?:_[FP])?\([^()]*\)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<space>[ \t]+)|[0-9][\w.']*|\n|.",
    re.DOTALL,
)


@dataclass(frozen=True)
class Piece:
    """An identifier, or a comment block's text without its marks, and the line (from 1) where it begins."""

    line: int
    text: str


@dataclass(frozen=True)
class SourceText:
    """Identifiers outside comments, strings and titles of tests, comment blocks and docstrings, and string literals."""

    names: list[Piece]
    comments: list[Piece]
    strings: list[Piece]


def sources(root: Path, folders: Iterable[str]) -> list[Path]:
    """C++ and Python files below these folders of `root`, sorted."""
    files = {file for folder in folders for file in (root / folder).rglob("*") if not file.is_symlink()}
    suffixes = CPP_SUFFIXES | PYTHON_SUFFIXES
    return sorted(file for file in files if file.suffix in suffixes and "__pycache__" not in file.parts)


def read_source(file: Path) -> SourceText:
    text = file.read_text(encoding="utf-8")
    return _read_python(text) if file.suffix in PYTHON_SUFFIXES else _read_cpp(text)


def _blocks(lines: list[tuple[int, int, str]]) -> list[Piece]:
    """Joins comments (line, column, text) of adjoining lines in one column; an empty comment line ends a block."""
    blocks: list[Piece] = []
    last = (-1, -1)
    for line, column, text in lines:
        if (line - 1, column) == last and blocks[-1].text and text:
            blocks[-1] = Piece(blocks[-1].line, f"{blocks[-1].text} {text}")
        else:
            blocks.append(Piece(line, text))
        last = (line, column)
    return [block for block in blocks if block.text]


def _read_cpp(text: str) -> SourceText:
    names: list[Piece] = []
    strings: list[Piece] = []
    comments: list[tuple[int, int, str]] = []
    line, start = 1, 0
    for found in _CPP_TOKEN.finditer(text):
        if found["comment"]:
            body = re.sub(r"^(//+!?<?|/\*+)|\*/$", "", found["comment"])
            body = " ".join(re.sub(r"^\s*\*", "", part).strip() for part in body.split("\n")).strip()
            comments.append((line, found.start() - start, body))
        elif found["name"]:
            names.append(Piece(line, found["name"]))
        elif found["string"]:
            strings.append(Piece(line, found["string"]))
        line += found[0].count("\n")
        if "\n" in found[0]:
            start = found.start() + found[0].rindex("\n") + 1
    return SourceText(names, _blocks(comments), strings)


def _read_python(text: str) -> SourceText:
    names: list[Piece] = []
    strings: list[Piece] = []
    comments: list[tuple[int, int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.append((*token.start, token.string.lstrip("#!: ").strip()))
        elif token.type == tokenize.NAME:
            names.append(Piece(token.start[0], token.string))
        elif token.type in _STRINGS:
            strings.append(Piece(token.start[0], token.string))
    blocks = _blocks(comments)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            blocks.append(Piece(node.body[0].lineno, docstring))
    return SourceText(names, sorted(blocks, key=lambda block: block.line), strings)
