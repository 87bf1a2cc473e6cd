"""A conversation with a model: messages, sampling parameters, and the next answer as a stream."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from kvanta.errors import InputError, ResourceError, reason_of
from kvanta.llm import LLM
from kvanta.outputs import RequestOutput
from kvanta.params.sampling_params import SamplingParams
from kvanta.parsers import harmony
from kvanta.parsers.call_reader import Found
from kvanta.parsers.harmony import HarmonyReader
from kvanta.parsers.reasoning import FORMATS, Begin, ReasoningFormat, ThinkReader, first_state, reasoning_format
from kvanta.text.chat_template import check_messages
from kvanta.text.tokenizer import Tokenizer

Message = dict[str, str]


def find_reasoning(name: str, tokenizer: Tokenizer) -> ReasoningFormat | None:
    """The format of a name of --reasoning-parser; without one, that of the marks in the vocabulary."""
    reasoning = reasoning_format(name, tokenizer)
    if name or reasoning:
        return reasoning
    for each in FORMATS.values():
        if not each.is_harmony and all(tokenizer.token_id(mark) is not None for mark in each.marks):
            return dataclasses.replace(each, begin=Begin.EITHER, switches=())
    return None


class Conversation:
    """Messages in OpenAI's form. Those before the last answer are in the prefix cache, so that they cost little."""

    def __init__(
        self, llm: LLM, sampling: Mapping[str, Any], *, system: str | None = None, reasoning_parser: str = ""
    ) -> None:
        """`sampling`: fields of SamplingParams. Raises InputError for a model without a chat template."""
        if llm.tokenizer.chat_template is None:
            raise InputError(
                f"{llm.model} has no chat template: `kvanta generate` continues texts, or give --chat-template FILE"
            )
        self.llm = llm
        self.params = SamplingParams(**sampling)
        self.messages: list[Message] = []
        self.reasoning = find_reasoning(reasoning_parser, llm.tokenizer)
        if system is not None:
            self.set_system(system)

    def ask(self, text: str) -> Generator[tuple[Found, RequestOutput], None, None]:
        """Streams the answer to a new message; without any answer, the message is taken back."""
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self._answer()
        finally:
            if self.messages[-1]["role"] == "user":
                self.messages.pop()

    def regenerate(self) -> Generator[tuple[Found, RequestOutput], None, None]:
        """Streams another answer to the last message; without any, the old one stays."""
        old = list(self.messages)
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            self.messages = old
            raise InputError("there is no answer to regenerate")
        try:
            yield from self._answer()
        finally:
            if self.messages[-1]["role"] == "user":
                self.messages = old

    def _answer(self) -> Generator[tuple[Found, RequestOutput], None, None]:
        """Leaving it early keeps what was said so far."""
        prompt = self.llm.chat_prompt(self.messages)
        room = self.llm.config.max_model_len - len(prompt.token_ids)
        if room <= 0:
            raise InputError(
                f"the conversation has {len(prompt.token_ids)} tokens, and the context holds "
                f"{self.llm.config.max_model_len} with the answer (--max-model-len): "
                "/undo takes back the last message, /clear begins again"
            )
        reader = self._reader(prompt.text or "")
        answer = Found()
        try:
            with closing(self.llm.stream(prompt, self._stream_params())) as stream:
                for piece, output in stream:
                    found = reader.take(piece) if reader else Found(piece)
                    if reader and output.finished:
                        found.add(reader.end())
                    answer.add(found)
                    yield found, output
        finally:
            if answer.content or answer.reasoning:
                said = {"role": "assistant", "content": answer.content}
                self.messages.append({**said, "reasoning_content": answer.reasoning} if answer.reasoning else said)

    def _stream_params(self) -> SamplingParams:
        if self.reasoning is None:
            return self.params
        ends = harmony.STOPS if self.reasoning.is_harmony else ()
        tokens = [token for end in ends if (token := self.llm.tokenizer.token_id(end)) is not None]
        tokens += self.params.stop_token_ids or ()
        return self._changed(skip_special_tokens=False, stop_token_ids=tokens or None)  # the marks may be special

    def _reader(self, prompt: str) -> ThinkReader | HarmonyReader | None:
        reasoning = self.reasoning
        if reasoning is None:
            return None
        if reasoning.is_harmony:
            channels = HarmonyReader(may_call=False)
            channels.prime(prompt)
            return channels
        return ThinkReader(
            reasoning, first_state(reasoning, prompt, self.llm.tokenizer.template_defaults, continues=False)
        )

    @property
    def system(self) -> str | None:
        """The system message."""
        first = self.messages[0] if self.messages else None
        return first["content"] if first and first["role"] == "system" else None

    def set_system(self, text: str) -> None:
        """Replaces the system message; an empty text removes it."""
        rest = self.messages[1:] if self.system is not None else self.messages
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def clear(self) -> None:
        """Forgets all but the system message."""
        self.messages = self.messages[:1] if self.system is not None else []

    def undo(self) -> str:
        """Takes back the last message of the user with its answer; returns it."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                text = self.messages[index]["content"]
                del self.messages[index:]
                return text
        raise InputError("there is no message to take back")

    def set_param(self, name: str, value: Any) -> None:
        """Sets a field of SamplingParams. Raises InputError for a value that it does not take."""
        self.params = self._changed(**{name: value})

    def _changed(self, **fields: Any) -> SamplingParams:
        return SamplingParams(**{**vars(self.params), **fields})

    def save(self, file: str) -> None:
        """Writes the messages as JSON. Raises ResourceError."""
        text = json.dumps({"model": self.llm.model, "messages": self.messages}, indent=1, ensure_ascii=False)
        try:
            Path(file).expanduser().write_text(text + "\n", encoding="utf-8", errors="replace")
        except (OSError, ValueError) as error:
            raise ResourceError(f"cannot write {file!r}: {reason_of(error)}") from None

    def load(self, file: str) -> None:
        """Replaces the messages by those of a file: `save`'s, or a list in OpenAI's form. Raises InputError."""
        try:
            content = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"cannot read {file!r}: {reason_of(error)}") from None
        messages: Any = content.get("messages") if isinstance(content, Mapping) else content
        try:
            check_messages(messages)
        except InputError as error:
            raise InputError(f"{file!r} has no conversation: {error}") from None
        self.messages = _texts(file, messages)


def _texts(file: str, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    for index, message in enumerate(messages):
        if not all(isinstance(message.get(key, ""), str) for key in ("content", "reasoning_content")):
            raise InputError(f"message {index} of {file!r} is not a text; kvanta chat takes texts only")
    return [
        {"content": "", **{key: message[key] for key in ("role", "content", "reasoning_content") if key in message}}
        for message in messages
    ]
