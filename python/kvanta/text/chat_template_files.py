"""The chat templates of a model's folder, by name and place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvanta.errors import InputError
from kvanta.files.json_file import read_regular_file
from kvanta.text.chat_template import MAX_TEMPLATE_BYTES
from kvanta.text.tokenizer_files.files import read_json

DEFAULT = "default"
TOOL_USE = "tool_use"
"""The template of chats with tools."""
FOLDER = "additional_chat_templates"


@dataclass(frozen=True)
class TemplateSource:
    """A template before it is compiled."""

    text: str
    place: str
    """The file in the folder, and the key in it."""


def read_template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, TemplateSource]:
    """DEFAULT and TOOL_USE, as far as there are any. `config`: tokenizer_config.json. As transformers reads them:

    chat_template.jinja with additional_chat_templates/*.jinja, else `chat_template` of tokenizer_config.json, else that
    of chat_template.json. Raises InputError for files that cannot be read.
    """
    files = {DEFAULT: folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / FOLDER).glob("*.jinja"))}
    sources = {
        name: TemplateSource(_read(file), str(file.relative_to(folder)))
        for name, file in files.items()
        if file.is_file()
    }
    if not sources:
        sources = _stored(folder, config.get("chat_template"), "tokenizer_config.json chat_template")
    if not sources:
        stored = read_json(folder / "chat_template.json").get("chat_template")
        sources = _stored(folder, stored, "chat_template.json chat_template")
    return {name: source for name, source in sources.items() if name in (DEFAULT, TOOL_USE)}


def _read(file: Path) -> str:
    try:
        return read_regular_file(file, MAX_TEMPLATE_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None


def _stored(folder: Path, stored: Any, place: str) -> dict[str, TemplateSource]:
    """Templates of a JSON file: one, or a list of {"name", "template"}."""
    if isinstance(stored, list):
        entries = {str(each.get("name")): each.get("template") for each in stored if isinstance(each, Mapping)}
    else:
        entries = {DEFAULT: stored}
    sources = {}
    for name, text in entries.items():
        if isinstance(text, str):
            sources[name] = TemplateSource(text, place)
        elif text is not None:
            raise InputError(f"the chat template of {folder} is a {type(text).__name__}, not a text")
    return sources
