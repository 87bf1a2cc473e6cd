"""`kvanta convert`: a GGUF file becomes a folder in Hugging Face layout."""

from __future__ import annotations

import argparse

from kvanta.cli.arguments import CommandParser
from kvanta.gguf.convert import convert_gguf
from kvanta.terminal.tables import human_bytes

_DESCRIPTION = """\
A GGUF file to a folder in Hugging Face layout: weights dequantized to bfloat16, tokenizer and chat template taken
along. Other commands take the file itself and use it in place.

  kvanta convert model.Q4_K_M.gguf ./model"""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta convert", description=_DESCRIPTION)
    result.add_argument("FILE", help="the .gguf file")
    result.add_argument("FOLDER", help="the new folder")
    return result


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    folder = convert_gguf(values.FILE, values.FOLDER)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {human_bytes(size)}")
    return 0
