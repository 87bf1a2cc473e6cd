"""Prompts that ask for the text between a prefix and a suffix, for models that were trained to fill in the middle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvanta.text.tokenizer import Tokenizer


class FillTokens(NamedTuple):
    """Tokens before the parts of a prompt."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    """Before a repository's name; None: the model has none."""
    file: int | None
    """Before a file's name; None: the model has none."""


# Names of the tokens for prefix, suffix and middle, and of those for a repository and a file.
_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
)
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<|reponame|>", "<reponame>")
_FILE = ("<|file_sep|>", "<file_sep>", "<|filename|>", "<filename>", "<|file_separator|>")
# Names that llama.cpp gives, since requests have none.
_REPOSITORY_NAME, _FILE_NAME = "myproject", "filename"
_SNIPPET = "\n\n--- snippet ---\n\n"
"""Before a file, for models without a token for it."""


def fill_tokens(tokenizer: Tokenizer) -> FillTokens | None:
    """The model's tokens; None: it was not trained to fill in."""
    for names in _NAMES:
        prefix, suffix, middle = (tokenizer.token_id(name) for name in names)
        if prefix is not None and suffix is not None and middle is not None:
            return FillTokens(prefix, suffix, middle, _first(tokenizer, _REPOSITORY), _first(tokenizer, _FILE))
    return None


def fill_prompt(
    tokenizer: Tokenizer,
    tokens: FillTokens,
    before: Sequence[str],
    after: str,
    files: Sequence[tuple[str, str]] = (),
    room: int = 0,
) -> list[int]:
    """Token ids of the prompt, whose answer stands between `before` and `after`.

    `before`: texts that follow each other, and are made tokens one by one. `files`: names and texts of other
    files, as much of their end as the prompt has `room` for, in tokens.
    """

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False) if text else []

    begin = [] if tokenizer.bos_id is None else tokenizer.encode("", add_special_tokens=True)[:1]
    begin = begin if begin == [tokenizer.bos_id] else []
    question = [
        tokens.prefix,
        *(token for text in before for token in ids(text)),
        tokens.suffix,
        *ids(after),
        tokens.middle,
    ]
    others: list[int] = []
    if files:
        if tokens.repository is not None:
            others += [tokens.repository, *ids(_REPOSITORY_NAME + "\n")]
        for name, text in (*files, (_FILE_NAME, "")):
            if tokens.file is not None:
                others += [tokens.file, *ids(name + "\n"), *ids(text)]
            elif text:
                others += [*ids(_SNIPPET), *ids(text)]
    kept = max(0, room - len(begin) - len(question))
    return [*begin, *others[len(others) - min(kept, len(others)) :], *question]


def _first(tokenizer: Tokenizer, names: Sequence[str]) -> int | None:
    return next((token for name in names if (token := tokenizer.token_id(name)) is not None), None)
