"""Lines of the user: edited, with a history that is kept, on a terminal; as they come from a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from pathlib import Path

from kvanta.errors import reason_of
from kvanta.files.home_folder import kvanta_home

_MAX_LINES = 1000
QUOTES = '"""'


class LineInput:
    """Reads messages from the standard input."""

    def __init__(self, commands: Iterable[str]) -> None:
        """`commands`: completed by Tab."""
        self.interactive = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):  # the tokenizer reports invalid UTF-8
            sys.stdin.reconfigure(errors="surrogateescape")
        self._history: Path | None = None
        if self.interactive:
            self._begin_history()
            self._complete(sorted(commands))

    def read(self, prompt: str) -> str | None:
        """One line without its end; None at the end of the input."""
        try:
            if self.interactive and sys.stdout.isatty():
                return input(prompt)
            if self.interactive:  # input would write the prompt between the answers
                print(prompt, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        except EOFError:
            return None
        return line.rstrip("\r\n") if line else None

    def read_block(self, first: str) -> str:
        """Lines up to one that ends with three quotes. `first`: the text after the opening quotes."""
        lines = [first]
        while not lines[-1].rstrip().endswith(QUOTES):
            line = self.read("... ")
            if line is None:
                return "\n".join(lines)
            lines.append(line)
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines).strip("\n")

    def close(self) -> None:
        """Writes the history."""
        if self._history is None:
            return
        import readline

        try:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)
            readline.write_history_file(self._history)
        except OSError as error:
            print(f"kvanta: the history cannot be written to {self._history}: {reason_of(error)}", file=sys.stderr)

    def _begin_history(self) -> None:
        import readline

        self._history = kvanta_home() / "chat_history"
        readline.set_history_length(_MAX_LINES)
        readline.set_auto_history(True)
        try:
            readline.read_history_file(self._history)
        except OSError:  # none yet
            readline.clear_history()

    def _complete(self, commands: list[str]) -> None:
        import readline

        def complete(text: str, state: int) -> str | None:
            matches = [command for command in commands if text and command.startswith(text)]
            return f"{matches[state]} " if state < len(matches) else None

        readline.set_completer_delims(" ")
        readline.set_completer(complete)
        readline.parse_and_bind("tab: complete")
