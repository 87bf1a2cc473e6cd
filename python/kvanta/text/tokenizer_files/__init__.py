"""Tokenizers of model folders: tokenizer.json, SentencePiece, tekken.json, tiktoken files, vocab.json + merges.txt.

Each of the others becomes a description in the form of tokenizer.json, in memory, so that everything else has one
path. No package of the original formats is needed (docs/adr/0030).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvanta.errors import InputError
from kvanta.text.tokenizer_files.files import (
    FolderSettings,
    Json,
    TokenizerDescription,
    check_not_a_pointer,
    read_json,
)

__all__ = ["TOKENIZER_JSON", "TokenizerDescription", "read_description"]

TOKENIZER_JSON, TEKKEN = "tokenizer.json", "tekken.json"


def _tekken(path: Path, settings: FolderSettings) -> TokenizerDescription:
    from kvanta.text.tokenizer_files.tekken import read_tekken

    return read_tekken(path, settings)


def _sentencepiece_or_tiktoken(path: Path, settings: FolderSettings) -> TokenizerDescription:
    """Llama 3 has a file of the other kind under the same name."""
    from kvanta.text.tokenizer_files.sentencepiece import read_sentencepiece
    from kvanta.text.tokenizer_files.tiktoken import is_tiktoken, read_tiktoken

    return read_tiktoken(path, settings) if is_tiktoken(path) else read_sentencepiece(path, settings)


def _tiktoken(path: Path, settings: FolderSettings) -> TokenizerDescription:
    from kvanta.text.tokenizer_files.tiktoken import read_tiktoken

    return read_tiktoken(path, settings)


def _vocab_and_merges(path: Path, settings: FolderSettings) -> TokenizerDescription:
    from kvanta.text.tokenizer_files.vocab_merges import read_vocab_merges

    return read_vocab_merges(path, settings)


_READERS: dict[str, Callable[[Path, FolderSettings], TokenizerDescription]] = {
    TEKKEN: _tekken,
    "tokenizer.model": _sentencepiece_or_tiktoken,
    "*.tiktoken": _tiktoken,
    "tiktoken.model": _tiktoken,
    "vocab.json": _vocab_and_merges,
}
"""Readers in the order of preference."""


def _name_prepend_schemes(part: Any) -> None:
    """Files of older versions of `tokenizers` have add_prefix_space alone, and the package refuses false."""
    if not isinstance(part, dict):
        return
    if part.get("type") == "Metaspace" and part.get("add_prefix_space") is False:
        part.setdefault("prepend_scheme", "never")
    for key in ("pretokenizers", "decoders"):
        for step in part.get(key) or []:
            _name_prepend_schemes(step)


def _take_tekken_pattern(folder: Path, description: Json) -> str:
    """Copies of Mistral's models have a tokenizer.json that cuts texts by another pattern than tekken.json next to it,
    which the models were trained with. Returns the name of the file that the pattern is from; "": tokenizer.json.
    """
    file = folder / TEKKEN
    cut = description.get("pre_tokenizer")
    if not file.is_file() or not isinstance(cut, dict):
        return ""
    from kvanta.text.tokenizer_files.tekken import pattern_of

    steps = cut.get("pretokenizers") if cut.get("type") == "Sequence" else None
    split = next((step for step in steps or [] if isinstance(step, dict) and step.get("type") == "Split"), None)
    model = description.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if split is None or not isinstance(vocabulary, dict):
        return ""
    pattern = pattern_of(file, vocabulary)
    if pattern is None or split.get("pattern") == {"Regex": pattern}:
        return ""
    split |= {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return TEKKEN


def read_description(folder: Path, settings: dict[str, Any]) -> TokenizerDescription:
    """The folder's tokenizer. `settings`: the content of tokenizer_config.json. Raises InputError."""
    first = folder / TOKENIZER_JSON  # published results were made with it
    if first.is_file():
        check_not_a_pointer(first)
        description = read_json(first)
        _name_prepend_schemes(description.get("pre_tokenizer"))
        _name_prepend_schemes(description.get("decoder"))
        return TokenizerDescription(first, description, pattern_file=_take_tekken_pattern(folder, description))
    for name, reader in _READERS.items():
        path = next(iter(sorted(folder.glob(name))), None)
        if path is None or not path.is_file():
            continue
        check_not_a_pointer(path)
        return reader(path, FolderSettings.read(folder, settings))
    names = ", ".join(["tokenizer.json", *_READERS]) + " with merges.txt"
    raise InputError(f"{folder} has no tokenizer: none of {names}; --tokenizer names another folder that has one")
