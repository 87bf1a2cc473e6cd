"""Prompts as users give them: text, token ids, or mappings with either."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvanta.errors import InputError
from kvanta.pooling_params import PoolingParams
from kvanta.sampling_params import SamplingParams
from kvanta.tokenizer import Tokenizer
from kvanta.values import one_line

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt, ready for the engine."""

    text: str | None
    token_ids: list[int]


def token_list(values: Any, vocab: int = 2**31) -> list[int]:
    """Token ids below `vocab` from any sequence of whole numbers, numpy arrays included."""
    try:
        if any(isinstance(value, (bool, np.bool_)) for value in values):
            raise TypeError
        tokens = [operator.index(value) for value in values]
    except TypeError:
        raise InputError(f"token ids must be whole numbers in a row, not {one_line(values, 80)}") from None
    for token in tokens:
        if not 0 <= token < vocab:
            raise InputError(f"token id {token} is not in 0..{vocab - 1}")
    return tokens


def read_prompt(prompt: Any, tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> TokenPrompt:
    """Raises InputError for anything that is no prompt, and for one without tokens."""
    text: str | None = None
    tokens: Any = prompt
    if isinstance(prompt, Mapping):
        known = prompt.keys() & {"prompt", "prompt_token_ids"}
        if not known:
            raise InputError(f"a prompt mapping needs 'prompt' or 'prompt_token_ids', not {sorted(map(str, prompt))}")
        text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if tokens is None:
            tokens = text
    if isinstance(tokens, str):
        if not tokens:
            raise InputError("the prompt is empty: give a text, or tokens such as {'prompt_token_ids': [bos]}")
        text = tokens
        tokens = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    elif isinstance(tokens, (bytes, bytearray)) or not hasattr(tokens, "__iter__"):
        raise InputError(f"a prompt is a text, token ids or {{'prompt_token_ids': [...]}}, not {type(tokens).__name__}")
    ids = token_list(tokens)
    if not ids:
        raise InputError("the prompt is empty: it has no tokens")
    return TokenPrompt(text, ids)


def truncated(
    prompt: TokenPrompt, params: SamplingParams | PoolingParams, tokenizer: Tokenizer, max_model_len: int
) -> TokenPrompt:
    """The prompt cut to `truncate_prompt_tokens`."""
    most = params.truncate_prompt_tokens
    if most == -1:
        most = max(1, max_model_len - params.reserved_tokens)
    if most is None or len(prompt.token_ids) <= most:
        return prompt
    ids = prompt.token_ids[:most] if params.truncation_side == "right" else prompt.token_ids[-most:]
    return TokenPrompt(tokenizer.decode(ids, skip_special_tokens=False), ids)


def split_prompts(prompts: Any) -> list[Any]:
    """A list of prompts from one prompt or several; a list of whole numbers is one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not hasattr(prompts, "__iter__"):
        raise InputError(f"prompts are texts or token ids, not {type(prompts).__name__}")
    entries = list(prompts)
    # True and False as well: an error later. An array of tokens has __index__, too.
    if entries and all(hasattr(entry, "__index__") and not getattr(entry, "ndim", 0) for entry in entries):
        return [entries]
    return entries
