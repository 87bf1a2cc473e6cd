"""The loop of `kvanta chat`: messages and commands in, streamed answers out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

from kvanta.errors import InputError, KvantaError
from kvanta.outputs import RequestOutput
from kvanta.params.checks import nearest
from kvanta.params.sampling_params import flag_fields
from kvanta.parsers.call_reader import Found
from kvanta.terminal.chat.conversation import Conversation
from kvanta.terminal.chat.generation_report import GenerationMeter, closing_line
from kvanta.terminal.chat.line_input import QUOTES, LineInput
from kvanta.terminal.chat.markdown import DIM, RESET, MarkdownRenderer, printable
from kvanta.terminal.tables import human_bytes

Answer = Generator[tuple[Found, RequestOutput], None, None]
# Command -> its arguments and its line in /help.
COMMANDS = {
    "/help": ("", "these lines"),
    "/clear": ("", "begin again; the system message stays"),
    "/system": ("[TEXT]", "set the system message, or remove it"),
    "/regenerate": ("", "another answer to the last message"),
    "/undo": ("", "take back the last message and its answer"),
    "/set": ("[NAME VALUE]", "set a sampling parameter, as in /set temperature 0.7; without arguments, show them"),
    "/params": ("", "the same as /set without arguments"),
    "/stats": ("", "tokens and cache memory"),
    "/save": ("FILE", "write the conversation as JSON"),
    "/load": ("FILE", "read it"),
    "/multiline": ("", f"a message of several lines, up to {QUOTES}; so does a message that begins with {QUOTES}"),
    "/exit": ("", "leave, as Ctrl-D does"),
}


class ChatSession:
    """Answers go to the standard output, everything else to stderr. On a terminal an error does not end the session."""

    def __init__(self, conversation: Conversation, *, plain: bool = False) -> None:
        """`plain`: Markdown is shown unformatted."""
        self._conversation = conversation
        self._input = LineInput(COMMANDS)
        terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._is_terminal = sys.stdout.isatty()
        self._styled = terminal and not plain and not os.environ.get("NO_COLOR")

    def run(self) -> int:
        """Until /exit or the end of the input. Returns the exit status."""
        if self._input.interactive:
            self._say(
                f"{self._conversation.llm.model}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves."
            )
        try:
            while (line := self._read_line()) is not None:
                if line.strip() in ("/exit", "/quit"):
                    break
                try:
                    self._handle(line)
                except KvantaError as error:
                    if not self._input.interactive:
                        raise
                    self._say(f"kvanta: {error}")
                except KeyboardInterrupt:  # within a message of several lines, or before an answer
                    if not self._input.interactive:
                        raise
                    self._say("\n[stopped]")
        finally:
            self._input.close()
        return 0

    def _read_line(self) -> str | None:
        while True:
            try:
                return self._input.read(">>> ")
            except KeyboardInterrupt:
                if not self._input.interactive:
                    raise
                self._say("\n/exit or Ctrl-D leaves.")

    def _handle(self, line: str) -> None:
        text = line.strip()
        if not text:
            return
        if text.startswith(QUOTES):
            self._stream(self._conversation.ask(self._input.read_block(text.removeprefix(QUOTES))))
        elif line.startswith("/"):
            name, _, argument = text.partition(" ")
            self._command(name, argument.strip())
        else:
            self._stream(self._conversation.ask(text))

    def _command(self, name: str, argument: str) -> None:
        if name not in COMMANDS:
            raise InputError(f"unknown command {name}{nearest(name, COMMANDS)}; a space before it makes it a message")
        wants = COMMANDS[name][0]
        if (argument and not wants) or (not argument and wants and not wants.startswith("[")):
            raise InputError(f"{name} takes {wants or 'no argument'}")
        talk = self._conversation
        actions: dict[str, Callable[[], None]] = {
            "/help": lambda: self._say(
                "\n".join(f"{f'{name} {args}':<18} {text}" for name, (args, text) in _commands())
            ),
            "/clear": talk.clear,
            "/system": lambda: talk.set_system(argument),
            "/regenerate": lambda: self._stream(talk.regenerate()),
            "/undo": lambda: self._say(f"taken back: {printable(talk.undo())[:70]}"),
            "/set": lambda: self._set(argument),
            "/params": self._show_params,
            "/stats": self._show_stats,
            "/save": lambda: talk.save(argument),
            "/load": lambda: self._load(argument),
            "/multiline": lambda: self._stream(talk.ask(self._input.read_block(""))),
        }
        actions[name]()

    def _load(self, file: str) -> None:
        self._conversation.load(file)
        self._say(f"{len(self._conversation.messages)} messages")

    def _set(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        if not text:
            if name:
                raise InputError(f"/set takes NAME VALUE, such as /set temperature 0.7, got {argument!r}")
            self._show_params()
            return
        known = _parameters()
        if name not in known:
            raise InputError(f"unknown parameter {name!r}{nearest(name, known)}; known: {', '.join(known)}")
        self._conversation.set_param(name, _value(text))

    def _show_params(self) -> None:
        self._say("\n".join(f"{name} {getattr(self._conversation.params, name)}" for name in _parameters()))

    def _show_stats(self) -> None:
        stats = self._conversation.llm.stats()
        config = self._conversation.llm.config
        self._say(
            f"{len(self._conversation.messages)} messages; context of {config.max_model_len} tokens\n"
            f"{stats['kv_cache_dtype']} cache: {stats['bytes_per_token']:,.0f} bytes/token, "
            f"{human_bytes(stats['cache_used_bytes'])} in use"
        )

    def _stream(self, answer: Answer) -> None:
        """Shows an answer; Ctrl-C ends the answer."""
        meter = GenerationMeter(self._conversation.llm)
        view = _AnswerView(styled=self._styled, terminal=self._is_terminal)
        output: RequestOutput | None = None
        stopped = False
        with _one_interrupt():
            try:
                with contextlib.closing(answer):
                    for found, output in answer:
                        view.show(found)
                        meter.update(output)
            except KeyboardInterrupt:
                if not self._input.interactive:
                    raise
                stopped = True
            finally:
                view.close()
        if output is None:
            self._say("[stopped]")
            return
        cached = f" | {output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens from the cache"
        self._say(f"{closing_line(meter.report(output))}{cached}" + (" | stopped" if stopped else ""))
        if output.outputs[0].finish_reason == "length":
            self._say(self._why_cut(output))

    def _why_cut(self, output: RequestOutput) -> str:
        limit = self._conversation.llm.config.max_model_len
        if len(output.prompt_token_ids) + len(output.outputs[0].token_ids) >= limit:
            return f"[the context of {limit} tokens is full (--max-model-len): /undo or /clear makes room]"
        return f"[cut off at max_tokens {self._conversation.params.max_tokens}: /set max_tokens N]"

    def _say(self, text: str) -> None:
        sys.stdout.flush()
        style = (DIM, RESET) if self._styled and sys.stderr.isatty() else ("", "")
        print(f"{style[0]}{text}{style[1]}", file=sys.stderr, flush=True)


class _AnswerView:
    """One answer on its way to the terminal: reasoning is dimmed; in a pipe it goes to stderr."""

    def __init__(self, *, styled: bool, terminal: bool) -> None:
        self._renderer = MarkdownRenderer() if styled else None
        self._terminal = terminal
        self._in_reasoning = False
        self._begun = False

    def show(self, found: Found) -> None:
        """The new text."""
        if found.reasoning:
            self._in_reasoning = True
            self._write_reasoning(found.reasoning)
        content = found.content if self._begun else found.content.lstrip("\n")
        if not content:
            return
        if self._in_reasoning:
            self._write_reasoning("\n\n")
            self._in_reasoning = False
        self._begun = True
        if self._renderer:
            content = self._renderer.take(content)
        elif self._terminal:
            content = printable(content)
        sys.stdout.write(content)
        sys.stdout.flush()

    def close(self) -> None:
        """The end of the answer's last line."""
        if not self._begun and not self._in_reasoning:
            return
        sys.stdout.write((self._renderer.end() if self._renderer else "") + "\n")
        sys.stdout.flush()

    def _write_reasoning(self, text: str) -> None:
        if self._renderer:
            sys.stdout.write(f"{DIM}{printable(text)}{RESET}")
            sys.stdout.flush()
        else:
            sys.stderr.write(printable(text))
            sys.stderr.flush()


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    """Ignores a second Ctrl-C while the first one ends the request."""
    pressed = False

    def interrupt(*_: object) -> None:
        nonlocal pressed
        if not pressed:
            pressed = True
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _commands() -> list[tuple[str, tuple[str, str]]]:
    return list(COMMANDS.items())


def _parameters() -> list[str]:
    return [*(field.name for field in flag_fields()), "seed"]


def _value(text: str) -> Any:
    """A value of JSON, None, or else the text."""
    if text.lower() == "none":
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
