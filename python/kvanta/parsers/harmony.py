"""Harmony, the format of GPT-OSS: messages in channels, with reasoning, calls and the answer.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
...<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from typing import Any

from kvanta.parsers.call_reader import CallReader, Found, StateReader
from kvanta.parsers.lenient_json import LenientJson

HARMONY_PARSER = "openai"
"""Its name among PARSERS."""
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", _START, _CHANNEL)
STOPS = ("<|return|>", "<|call|>")
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
MARKS = (*_ENDS, _MESSAGE, "<|constrain|>")
_MAX_HEADER = 512
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|\s|>)to=([^\s<]+)")


class HarmonyReader(StateReader):
    """Analysis is reasoning, calls of functions are calls, everything else that is said to the user is content.

    `inner` reads the content, as where the answer must be a call. With `may_call` false a call is content.
    """

    marks = MARKS

    def __init__(self, *, inner: CallReader | None = None, may_call: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self._inner = inner
        self._may_call = may_call
        self._state = self._header
        self._kind = ""
        self._json = LenientJson()
        self._has = dict.fromkeys(("reasoning", "content"), False)
        self._separates = False

    def prime(self, prompt: str) -> None:
        """Goes to where the prompt ends, which is in a message's header, or in a message that is continued."""
        begin = prompt.rfind(_START)
        if begin >= 0:
            self._buffer.add(prompt[begin + len(_START) :])
            while self._state(Found(), False):
                pass
            if self._state == self._header and _CHANNEL not in self._buffer.text:  # the role alone
                self._buffer.take()
        self._has = dict.fromkeys(self._has, False)
        self._separates = False

    @property
    def in_reasoning(self) -> bool:
        """True within a message of the channel analysis."""
        return self._state == self._body and self._kind == "reasoning"

    @property
    def in_content(self) -> bool:
        """True within the final message."""
        return self._state == self._body and self._kind == "final"

    def take(self, text: str) -> Found:
        """The parts of the text by their channels."""
        return self._through_inner(super().take(text), final=False)

    def end(self) -> Found:
        """The rest."""
        return self._through_inner(super().end(), final=True)

    def _through_inner(self, found: Found, *, final: bool) -> Found:
        if self._inner is None:
            return found
        inner = self._inner.take(found.content)
        if final:
            inner.add(self._inner.end())
        self.calls = max(self.calls, self._inner.calls)
        return Found(inner.content, found.calls + inner.calls, found.reasoning)

    def _content(self, found: Found, final: bool) -> bool:
        """Between messages."""
        _, mark = self._buffer.take_before((_START, _CHANNEL), final=final)
        if mark == _CHANNEL:
            self._buffer.put_back(mark)
        if mark:
            self._state = self._header
        return bool(mark)

    def _header(self, found: Found, final: bool) -> bool:
        hit = self._buffer.find((_MESSAGE,))
        if hit is not None:
            self._begin_message(found, self._buffer.take(hit[0]))
            self._buffer.take(len(_MESSAGE))
            self._state = self._body
            return True
        if not final and len(self._buffer.text) <= _MAX_HEADER:
            return False
        if _CHANNEL in self._buffer.text or _START in self._buffer.text:  # cut off within a header
            self._buffer.take()
            return False
        self._kind = "final"  # a model that does not keep to the format
        self._state = self._body
        return bool(self._buffer.text)

    def _begin_message(self, found: Found, header: str) -> None:
        named, addressed = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        channel, recipient = named[1] if named else "", addressed[1] if addressed else ""
        is_function = recipient.startswith("functions.") or recipient in self._schemas
        if is_function and self._may_call:
            self._kind = "call"
            self._json = LenientJson()
            self._begin_call(found, recipient.removeprefix("functions."))
        elif channel == "analysis" or (recipient and not is_function):  # also programs for tools of the model's own
            self._kind = "reasoning"
        else:
            self._kind = "final" if channel == "final" else "content"
        self._separates = True

    def _body(self, found: Found, final: bool) -> bool:
        before, mark = self._buffer.take_before(_ENDS, final=final)
        if self._kind == "call":
            if not self._json.ended:
                self._add_arguments(found, self._json.take(before, final=bool(mark)))
        elif before:
            self._say(found, before)
        if self._kind == "call" and (mark or final):  # <|call|> is a stop token, which the text does not show
            self._end_call(found)
        if not mark:
            return False
        if mark in (_START, _CHANNEL):
            self._buffer.put_back(mark)
        self._state = self._content
        return True

    def _say(self, found: Found, text: str) -> None:
        """A line's end stands between messages of one kind."""
        field = "reasoning" if self._kind == "reasoning" else "content"
        if self._separates and self._has[field]:
            text = "\n" + text
        self._separates, self._has[field] = False, True
        setattr(found, field, getattr(found, field) + text)
