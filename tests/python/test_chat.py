"""`kvanta chat`: through a pseudo-terminal, through pipes, and its Markdown."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvanta import LLM
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.errors import InputError
from kvanta.parsers.call_reader import Found
from kvanta.terminal.chat.conversation import Conversation, find_reasoning
from kvanta.terminal.chat.markdown import BOLD, CODE, DIM, RESET, MarkdownRenderer, write_answer
from kvanta.terminal.chat.session import _AnswerView

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
COMMAND = [sys.executable, "-m", "kvanta", "chat"]
OPTIONS = ["--chat-template", TEMPLATE, "--temperature", "0", "--threads", "1", "--kv-cache-memory-bytes", "256MiB"]
_WAITS_FOR_INPUT = ("23 ", "270 ", "72 ")  # select and pselect6 of x86-64, pselect6 of aarch64
SECONDS = 120  # until a test fails; nothing waits for this long


class Terminal:
    """The command on a pseudo-terminal."""

    def __init__(self, home: Path, *words: str, model: str = "stories260k") -> None:
        self._screen, inner = pty.openpty()
        environment = {**os.environ, "KVANTA_HOME": str(home), "TERM": "xterm"}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [*COMMAND, model, *OPTIONS, *words],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment,
            start_new_session=True,
            close_fds=True,
        )
        os.close(inner)
        self._text = ""

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def wait_for(self, pattern: str) -> str:
        """The text up to the end of the first match, which is removed."""
        while not (match := re.search(pattern, self._text, re.DOTALL)):
            ready, _, _ = select.select([self._screen], [], [], SECONDS)
            assert ready, f"{pattern!r} has not come after: {self._text!r}"
            try:
                self._text += os.read(self._screen, 65536).decode(errors="replace")
            except OSError:
                pytest.fail(f"the program has ended before {pattern!r}: {self._text!r}")
        seen, self._text = self._text[: match.end()], self._text[match.end() :]
        return seen

    def interrupt(self) -> None:
        """Ctrl-C, once the program waits for a line: what it shows of a prompt comes before that."""
        state = Path(f"/proc/{self.process.pid}/syscall")
        while not state.read_text().startswith(_WAITS_FOR_INPUT):
            time.sleep(0.01)
        os.kill(self.process.pid, signal.SIGINT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        os.close(self._screen)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path)
    yield opened
    opened.close()


def test_a_conversation_on_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for(r"/help lists the commands.*>>> ")
    terminal.type("/set max_tokens 8\r")
    terminal.wait_for(">>> ")
    terminal.type("Once upon a time\r")
    assert "8 tokens" in terminal.wait_for(r"tokens/s.*bytes/token.*from the cache.*cut off at max_tokens 8.*>>> ")
    terminal.type("/sy\tYou tell stories.\r")  # Tab completes /system
    terminal.wait_for(">>> ")
    terminal.type('"""The dog\rran away"""\r')
    terminal.wait_for("tokens/s.*>>> ")
    terminal.type("/nonsense\r")
    terminal.wait_for("unknown command /nonsense.*>>> ")
    terminal.type("/set temperature hot\r")
    terminal.wait_for("temperature must be a number.*>>> ")
    terminal.type(f"/save {tmp_path}/talk.json\r")
    terminal.wait_for(">>> ")
    terminal.type("\x04")
    assert terminal.process.wait(SECONDS) == 0
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert (saved[0]["content"], saved[3]["content"]) == ("You tell stories.", "The dog\nran away")
    history = (tmp_path / "chat_history").read_text()
    assert "Once upon a time" in history
    assert (tmp_path / "chat_history").stat().st_mode & 0o077 == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    """A context of 131,072 tokens: the answer cannot have ended by itself."""
    folder = tmp_path / "long"
    shutil.copytree(SHIPPED / "stories260k", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 131072}))
    terminal = Terminal(tmp_path, "--ignore-eos", model=str(folder))
    try:
        terminal.wait_for(">>> ")
        terminal.type("Hello\r")
        terminal.wait_for(r"\w+ \w+ \w+")
        os.kill(terminal.process.pid, signal.SIGINT)
        assert "[cut off" not in terminal.wait_for(r"tokens/s.*\| stopped.*>>> ")
        terminal.interrupt()
        terminal.wait_for("/exit or Ctrl-D leaves.*>>> ")
        terminal.type('"""The first line\r')
        terminal.wait_for(r"\.\.\. ")
        terminal.interrupt()
        terminal.wait_for(r"\[stopped\].*>>> ")
        terminal.type("/stats\r")
        assert "2 messages" in terminal.wait_for("in use.*>>> ")  # what has been said is kept
        terminal.type("/exit\r")
        assert terminal.process.wait(SECONDS) == 0
    finally:
        terminal.close()


def piped(*lines: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "stories260k", *OPTIONS, *options],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_a_pipe_gets_answers_alone(llm: LLM) -> None:
    done = piped("Once upon a time", "", "/undo", options=("--max-tokens", "8"))
    assert done.returncode == 0
    first = Conversation(with_template(llm), {"max_tokens": 8, "temperature": 0.0})
    expected = "".join(found.content for found, _ in first.ask("Once upon a time")).lstrip("\n")
    assert done.stdout == expected + "\n"
    assert "tokens/s" in done.stderr
    assert "taken back: Once upon a time" in done.stderr


@pytest.mark.parametrize(
    ("line", "reason"),
    [("/regenerate", "no answer to regenerate"), ("/load /no/such", "cannot read '/no/such'"), ("a " * 600, "/undo")],
)
def test_an_error_ends_a_pipe(line: str, reason: str) -> None:
    done = piped(line)
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr


def with_template(llm: LLM) -> LLM:
    llm.tokenizer.use_chat_template(TEMPLATE)
    return llm


def test_messages_of_a_conversation(llm: LLM, tmp_path: Path) -> None:
    talk = Conversation(with_template(llm), {"max_tokens": 6, "temperature": 0.0}, system="Be kind.")
    used = llm.stats()["cache_used_bytes"]
    list(talk.ask("Once upon a time"))
    first = talk.messages[-1]["content"]
    list(talk.regenerate())
    assert talk.messages[-1]["content"] == first  # greedy
    stream = talk.ask("The dog")
    next(stream)
    stream.close()  # as Ctrl-C does
    assert llm.stats()["cache_used_bytes"] == used  # the request is gone
    assert [message["role"] for message in talk.messages[:3]] == ["system", "user", "assistant"]
    if len(talk.messages) == 5:
        talk.undo()
    talk.save(str(tmp_path / "talk.json"))
    other = Conversation(llm, {})
    other.load(str(tmp_path / "talk.json"))
    assert other.messages == talk.messages
    other.undo()
    assert other.messages == [{"role": "system", "content": "Be kind."}]
    with pytest.raises(InputError, match="no message"):
        other.undo()
    other.set_system("")
    assert other.messages == []
    (tmp_path / "calls.json").write_text(json.dumps([{"role": "user", "tool_calls": []}]))
    other.load(str(tmp_path / "calls.json"))
    assert other.undo() == ""


def test_a_conversation_that_does_not_fit(llm: LLM) -> None:
    talk = Conversation(with_template(llm), {})
    with pytest.raises(InputError, match="context holds 512"):
        list(talk.ask("a " * 600))
    assert talk.messages == []


def test_a_model_without_reasoning(llm: LLM) -> None:
    assert find_reasoning("", llm.tokenizer) is None
    assert find_reasoning("qwen3", llm.tokenizer) is not None


TEXT = "# Title\nSome **bold** and `code * x`, 2 * 3.\n- one\n1. two\n```py\na = **b**\n```\nend \x1b[2J"


HOSTILE = ["\x1b]0;ti", "tle\x07\x1b[2Jtext\r", "\x9b2J\x00 more\n\tend"]


@pytest.mark.parametrize("view", ["styled", "terminal", "reasoning", "generate"])
def test_a_models_text_cannot_steer_the_terminal(
    view: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = _AnswerView(styled=view == "styled", terminal=True)
    for piece in HOSTILE:
        if view == "generate":
            write_answer(piece)
        else:
            reasons = view == "reasoning"
            shown.show(Found(reasoning=piece if reasons else "", content="" if reasons else piece))
    shown.close()
    written = "".join(capsys.readouterr())
    for style in (RESET, BOLD, DIM, CODE):
        written = written.replace(style, "")
    assert written.strip() == "]0;title[2Jtext2J more\n\tend"


def test_markdown_does_not_depend_on_the_pieces() -> None:
    whole = MarkdownRenderer()
    expected = whole.take(TEXT) + whole.end()
    for size in (1, 2, 3, 7):
        pieces = MarkdownRenderer()
        shown = "".join(pieces.take(TEXT[at : at + size]) for at in range(0, len(TEXT), size)) + pieces.end()
        assert shown == expected
    assert f"{BOLD}Title{RESET}\n" in expected
    assert f"Some {BOLD}bold{RESET} and {CODE}code * x{RESET}, 2 * 3." in expected
    assert "• one\n1. two\n" in expected
    assert f"{CODE}a = **b**{RESET}\n" in expected
    assert "\x1b[2J" not in expected  # a model does not steer the terminal
    assert "```" not in expected
