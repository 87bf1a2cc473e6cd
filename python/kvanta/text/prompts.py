"""Prompts as users give them: text, token ids, or mappings with either; and arguments for several of them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from kvanta.errors import InputError
from kvanta.params.checks import one_line, whole_number
from kvanta.params.checks import text as checked_text
from kvanta.params.pooling_params import PoolingParams
from kvanta.params.sampling_params import SamplingParams
from kvanta.text.tokenizer import Tokenizer

_REFUSED: Mapping[str, str] = {
    "lora_request": "merge the adapter into the weights",
    "tokenization_kwargs": "the parameters have truncate_prompt_tokens, and prompts may be token ids",
}
AnyParams = TypeVar("AnyParams", SamplingParams, PoolingParams)
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt, ready for the engine."""

    text: str | None
    token_ids: list[int]
    cache_salt: str = ""
    """Only prompts with the same one share cached prefixes."""


def token_list(values: Any, vocab: int = 2**31) -> list[int]:
    """Token ids below `vocab` from any sequence of whole numbers, numpy arrays included."""
    try:
        if any(isinstance(value, (bool, np.bool_)) for value in values):
            raise TypeError
        tokens = [operator.index(value) for value in values]
    except TypeError:
        raise InputError(f"token ids must be whole numbers in a row, not {one_line(values, 80)}") from None
    for position, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise InputError(f"token id {token} at position {position} is not in 0..{vocab - 1}")
    return tokens


def read_prompt(prompt: Any, tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> TokenPrompt:
    """Raises InputError for anything that is no prompt, and for one without tokens."""
    text: str | None = None
    tokens: Any = prompt
    cache_salt = ""
    if isinstance(prompt, Mapping):
        _check_keys(prompt)
        text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
        cache_salt = checked_text("cache_salt", prompt.get("cache_salt") or "")
        if tokens is None:
            tokens = text
    if isinstance(tokens, str):
        if not tokens:
            raise InputError("the prompt is empty: give a text, or token ids such as [1]")
        text = tokens
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    elif isinstance(tokens, (bytes, bytearray)) or not hasattr(tokens, "__iter__"):
        raise InputError(f"a prompt is a text, token ids or {{'prompt_token_ids': [...]}}, not {type(tokens).__name__}")
    else:
        ids = token_list(tokens, tokenizer.vocab)
    if not ids:
        raise InputError("the prompt is empty: it has no tokens")
    return TokenPrompt(text, ids, cache_salt)


def _check_keys(prompt: Mapping[Any, Any]) -> None:
    """Refuses keys that would be ignored, unless their values have no effect: vLLM's prompts may have such ones."""
    if not prompt.keys() & {*_PROMPT_KEYS[:2]}:
        raise InputError(f"a prompt mapping needs 'prompt' or 'prompt_token_ids', not {sorted(map(str, prompt))}")
    for key, value in prompt.items():
        if key not in _PROMPT_KEYS and value is not None and not (isinstance(value, Sized) and len(value) == 0):
            raise InputError(
                f"{one_line(key)} of a prompt is not supported, got {one_line(value)}; supported: "
                f"{', '.join(_PROMPT_KEYS)}"
            )


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
    return dataclasses.replace(prompt, text=tokenizer.decode(ids, skip_special_tokens=False), token_ids=ids)


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


def one_each(
    name: str, given: AnyParams | Sequence[AnyParams] | None, default: AnyParams, count: int
) -> list[AnyParams]:
    """Parameters of `count` prompts, from one or from as many; None: the default."""
    kind = type(default)
    single = default if given is None else given
    params = [single] * count if isinstance(single, kind) else single
    if not isinstance(params, (list, tuple)) or not all(isinstance(entry, kind) for entry in params):
        raise InputError(f"{name} must be a {kind.__name__} or a list of them, got {one_line(given)}")
    if len(params) != count:
        raise InputError(f"there are {len(params)} {name.replace('_params', '')} parameters for {count} prompts")
    return [dataclasses.replace(each) for each in params]  # checks again: fields may have been assigned since


def refuse_arguments(**given: object) -> None:
    """Raises InputError for an argument of _REFUSED that is not None, nor empty."""
    for name, value in given.items():
        if value is not None and not (isinstance(value, Sized) and len(value) == 0):
            raise InputError(f"{name} is not supported, got {one_line(value)}: {_REFUSED[name]}")


def check_content_format(given: object) -> None:
    """Raises InputError unless the chat template gets the contents of messages as texts."""
    if given not in ("auto", "string"):
        raise InputError(
            f"chat_template_content_format must be auto or string, got {one_line(given)}: templates get texts"
        )


def read_priorities(priority: int | Sequence[int] | None, count: int) -> list[int]:
    """One per prompt."""
    given = list(priority) if isinstance(priority, (list, tuple)) else [0 if priority is None else priority] * count
    if len(given) != count:
        raise InputError(f"priority has {len(given)} entries for {count} prompts")
    return [whole_number("priority", each, -(2**31), 2**31 - 1) for each in given]
