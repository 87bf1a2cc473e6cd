"""Arguments of LLM's methods for several prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Sized
from typing import TypeVar

from kvanta.errors import InputError
from kvanta.params.checks import one_line, whole_number
from kvanta.params.pooling_params import PoolingParams
from kvanta.params.sampling_params import SamplingParams

_REFUSED: Mapping[str, str] = {
    "lora_request": "merge the adapter into the weights",
    "tokenization_kwargs": "the parameters have truncate_prompt_tokens, and prompts may be token ids",
}
AnyParams = TypeVar("AnyParams", SamplingParams, PoolingParams)


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
