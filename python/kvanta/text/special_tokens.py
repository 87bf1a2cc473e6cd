"""Special and added tokens that a tokenizer's folder names outside the file of its vocabulary, as transformers takes
them: their texts by name for templates, and their ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from kvanta.errors import InputError
from kvanta.files.json_file import text_config
from kvanta.text.tokenizer_files.files import AddedToken, read_json

_LISTS = ("additional_special_tokens", "extra_special_tokens")
_NAMED = (
    "model_specific_special_tokens",
    "extra_special_tokens",
)  # objects of tokens by name; the first: transformers 5
_FLAGS = ("single_word", "lstrip", "rstrip")


def _text_of(value: Any) -> str | None:
    """The text of a token that may be an object with its flags."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def read_special_texts(folder: Path, *sources: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, int]]:
    """Texts by their names (`bos_token`, `image_token`), and for each name the index of the source that has it first.

    Raises InputError for a text that is not valid Unicode.
    """
    texts: dict[str, str] = {}
    places: dict[str, int] = {}
    for place, source in enumerate(sources):
        for name, value in _entries(source).items():
            text = _text_of(value)
            if not str(name).endswith("_token") or text is None or name in texts:
                continue
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise InputError(f"{name} of {folder} is {text!r:.60}, which is not valid Unicode")
            texts[name], places[name] = text, place
    return texts, places


def _entries(source: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, those of _NAMED among them."""
    named = [source.get(name) for name in _NAMED]
    return {name: value for each in (*named, source) if isinstance(each, Mapping) for name, value in each.items()}


def special_flags(*sources: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
    """Flags of special tokens, by their texts, where a file has them."""
    values = [value for source in sources for value in _entries(source).values()]
    values += [entry for source in sources for name in _LISTS for entry in _list_of(source.get(name))]
    return {
        value["content"]: {flag: value[flag] is True for flag in _FLAGS if flag in value}
        for value in reversed(values)
        if isinstance(value, Mapping) and isinstance(value.get("content"), str)
    }


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def special_lists(*sources: Mapping[str, Any]) -> list[str]:
    """Texts of the special tokens that have no name."""
    found = [_text_of(entry) for source in sources for name in _LISTS for entry in _list_of(source.get(name))]
    return list(dict.fromkeys(text for text in found if text))


def add_declared_tokens(fast: tokenizers.Tokenizer, declared: Mapping[int, AddedToken]) -> None:
    """Adds what `added_tokens_decoder` and `added_tokens.json` declare, in the order of the ids that they have there.

    A token that the vocabulary has keeps its id, another gets the next free one.
    """
    known = fast.get_added_tokens_decoder()
    tokens = [tokenizers.AddedToken(**token.__dict__) for _, token in sorted(declared.items())]
    present = {repr(token) for token in known.values()}
    if missing := [token for token in tokens if token.content and repr(token) not in present]:
        fast.add_tokens(missing)


def add_special_tokens(
    fast: tokenizers.Tokenizer, texts: Iterable[str], rows: int | None, declared: Mapping[str, Mapping[str, bool]]
) -> list[str]:
    """Makes tokens of `texts` special ones, whole in every prompt and not shown in answers.

    `rows`: of the model's embeddings; None: unknown. `declared`: special_flags, for tokens that are new. Returns the
    texts that were left out, because the vocabulary does not have them and the model has no row for another token.
    """
    known = {token.content: token for token in fast.get_added_tokens_decoder().values()}
    size, left_out, changed = fast.get_vocab_size(), [], []
    for text in dict.fromkeys(texts):
        token = known.get(text)
        if (token is not None and token.special) or not text:
            continue
        if token is None and fast.token_to_id(text) is None:
            if rows is not None and size >= rows:
                left_out.append(text)
                continue
            size += 1
        flags = declared.get(text, {}) if token is None else {flag: getattr(token, flag) for flag in _FLAGS}
        changed.append(tokenizers.AddedToken(text, normalized=False, special=True, **flags))
    if changed:
        fast.add_special_tokens(changed)
    return left_out


def model_rows(folder: Path) -> int | None:
    """Rows of the embeddings, by config.json; None if it does not say."""
    try:
        config = read_json(folder / "config.json")
    except InputError:  # which is the engine's to name
        return None
    rows = config.get("vocab_size", text_config(config).get("vocab_size"))
    return rows if isinstance(rows, int) and not isinstance(rows, bool) and rows > 0 else None
