"""The included texts as tokens: prose, code, several languages, and chats as the model's template writes them."""

from __future__ import annotations

import re
from pathlib import Path

from kvanta.errors import InputError
from kvanta.text.tokenizer import Tokenizer

TEXT = Path(__file__).parents[1] / "texts" / "calibration_mix.txt"
TOKENS = 8192
"""Fewest tokens of default_tokens() and the number of mix_tokens(): as many as the matrices of +query need."""
_CHAT = re.compile(r"(?:^(?:User|Assistant): .*\n)+", re.MULTILINE)


def mix_tokens(tokenizer: Tokenizer) -> list[int]:
    """The first TOKENS of the included texts as they are, as often as it takes."""
    tokens: list[int] = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    return (tokens * (TOKENS // max(1, len(tokens)) + 1))[:TOKENS]


def default_tokens(tokenizer: Tokenizer) -> list[int]:
    """The included texts, their chats in the tokenizer's chat template: all of them, at least TOKENS.

    Special tokens of a template have the largest keys of many models, so a text without them gives too small scales.
    """
    text = TEXT.read_text(encoding="utf-8")
    tokens: list[int] = []
    end = 0
    for chat in _CHAT.finditer(text):
        tokens += tokenizer.encode(text[end : chat.start()])
        tokens += _chat_tokens(tokenizer, chat.group())
        end = chat.end()
    tokens += tokenizer.encode(text[end:])
    return tokens * -(-TOKENS // max(1, len(tokens)))


def _chat_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of lines "User: ..." and "Assistant: ..."."""
    lines = [line.partition(": ") for line in text.splitlines()]
    messages = [{"role": role.lower(), "content": content} for role, _, content in lines]
    try:
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    except InputError:  # no template, or one for other conversations
        return tokenizer.encode(text)
    return tokenizer.encode(rendered, add_special_tokens=False)
