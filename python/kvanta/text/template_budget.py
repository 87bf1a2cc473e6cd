"""Budget of rendering a chat template: steps, characters and time, which grow with the chat."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2.runtime import Undefined

# Budget of one rendering of a short chat. A chat of a thousand messages takes some thousands of steps; but published
# templates look at all earlier messages for each message, or copy them.
_MOST_STEPS = 500_000
_STEPS_OF_A_PAIR = 16  # of messages
_MOST_CHARACTERS = 2**26
_COPIES_FOR_A_MESSAGE = 64  # of the whole chat
_MOST_CHARACTERS_EVER = 2**31
_MOST_SECONDS = 5.0  # of the thread's own time
_SECONDS_OF_A_MESSAGE = 0.01
_MOST_SECONDS_EVER = 20.0

STEPS_AT_ONCE = 32
"""Steps after which the time is looked at."""
_LONG_TEXT = 2**15  # characters: it is also looked at when a text is as long

ENTRY = 8
"""Characters that take as much memory as an entry of a list."""
_CONTAINER = 64


class _Budget:
    """The limits of one rendering, and what is left of them."""

    __slots__ = ("characters", "characters_left", "deadline", "looked", "seconds", "steps", "steps_left")

    def __init__(self, messages: int, characters: int) -> None:
        self.steps = self.steps_left = _MOST_STEPS + _STEPS_OF_A_PAIR * messages**2
        copies = _COPIES_FOR_A_MESSAGE * messages * characters
        self.characters = self.characters_left = min(_MOST_CHARACTERS + copies, _MOST_CHARACTERS_EVER)
        self.seconds = min(_MOST_SECONDS + _SECONDS_OF_A_MESSAGE * messages, _MOST_SECONDS_EVER)
        self.deadline = time.thread_time() + self.seconds
        self.looked = self.steps_left
        """The steps that were left when the time was last looked at."""

    def look(self) -> None:
        """Raises an error if steps, characters or time are spent."""
        if self.steps_left < 0:
            raise jinja2.TemplateError(f"it takes more than {self.steps} steps")
        if self.characters_left < 0:
            raise jinja2.TemplateError(f"it makes more than {self.characters} characters")
        if time.thread_time() > self.deadline:
            raise jinja2.TemplateError(f"it takes more than {self.seconds:g} seconds")
        self.looked = self.steps_left


_budget: ContextVar[_Budget] = ContextVar("budget")


def begin_budget(messages: int, characters: int) -> None:
    """Before the rendering of a chat. `messages`: with the calls in them; `characters`: of all of it."""
    _budget.set(_Budget(messages, characters))


def chat_size(chat: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Messages, with the calls in them, and characters, roughly: for begin_budget."""
    messages = characters = 0
    for message in chat:
        calls = message.get("tool_calls")
        messages += 1 + (len(calls) if isinstance(calls, list) else 0)
        texts = [value for value in message.values() if isinstance(value, str)]
        characters += sum(map(len, texts))
        if len(texts) < len(message):
            characters += _length_up_to([value for value in message.values() if not isinstance(value, str)], 2**31)
    return messages, characters


def spend(steps: int) -> None:
    """Called before steps are taken."""
    budget = _budget.get()
    budget.steps_left -= steps
    if budget.looked - budget.steps_left >= STEPS_AT_ONCE or budget.steps_left < 0:
        budget.look()


def allocate(characters: int) -> None:
    """Called before a text of that length is made."""
    budget = _budget.get()
    budget.characters_left -= characters
    if characters >= _LONG_TEXT or budget.characters_left < 0:
        budget.look()


def text_length(value: object) -> int:
    """Characters of a value's text, at least roughly, as far as the budget goes."""
    return _length_up_to(value, _budget.get().characters_left)


def _length_up_to(value: object, most: int) -> int:
    """Characters of a value's text, at least roughly; an object that is in it twice is counted twice."""
    if isinstance(value, str):
        return len(value)
    total = 0
    waiting = [value]
    while waiting and total <= most:
        each = waiting.pop()
        if isinstance(each, (str, bytes)):
            total += len(each)
        elif isinstance(each, Mapping):
            total += _CONTAINER + ENTRY * len(each)
            waiting += each
            waiting += each.values()
        elif isinstance(each, (list, tuple, set, frozenset)):
            total += _CONTAINER + ENTRY * len(each)
            waiting += each
        elif isinstance(each, int):
            total += each.bit_length() // 3 + ENTRY
        elif each is not None and not isinstance(each, Undefined):
            total += 2 * ENTRY
    return total
