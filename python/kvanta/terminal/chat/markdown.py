"""Markdown in the terminal, while it is being generated: headings, lists, bold, code."""

from __future__ import annotations

import re
import sys

RESET, BOLD, DIM, CODE = "\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[36m"
# Beginnings of a line that may still become a mark, and the marks.
_UNDECIDED = re.compile(r"[ \t]*(#{1,6}|`{1,2}|~{1,2}|[-*+]|\d{1,3}[.)]?)?")
_HEADING = re.compile(r"[ \t]*(#{1,6} )")
_FENCE = re.compile(r"[ \t]*(```|~~~)")
_ITEM = re.compile(r"([ \t]*)([-*+]|\d{1,3}[.)]) ")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """The text without control characters, with which a model could steer the terminal."""
    return _CONTROL.sub("", text)


def write_answer(piece: str) -> None:
    """Writes a piece of a model's text to stdout; to a terminal what is printable alone."""
    sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


class MarkdownRenderer:
    """Turns pieces of Markdown into text with ANSI styles; holds back only what may be a mark. One per answer."""

    def __init__(self) -> None:
        self._held = ""
        self._at_start = True
        self._fence = ""
        """The mark that ends the code block; empty outside of one."""
        self._hidden_line = False
        """Within the rest of a line that ends a code block."""
        self._base = ""
        self._bold = self._code = False

    def take(self, piece: str) -> str:
        """The text that is certain."""
        self._held += printable(piece)
        return self._render(final=False)

    def end(self) -> str:
        """The rest, with every style switched off."""
        return self._render(final=True) + RESET

    def _render(self, *, final: bool) -> str:
        shown = ""
        while self._held:
            step = self._begin_line(final=final) if self._at_start else self._in_line(final=final)
            if step is None:
                break
            shown += step
        return shown

    def _begin_line(self, *, final: bool) -> str | None:
        """The mark at the beginning of a line; None while it is not certain."""
        if _UNDECIDED.fullmatch(self._held) and not final:
            return None
        self._at_start = False
        fence = _FENCE.match(self._held)
        if fence and self._fence in ("", fence[1]):
            self._hidden_line = bool(self._fence)
            self._fence = "" if self._fence else fence[1]
            self._held = self._held[fence.end() :]
            self._base = DIM if self._fence else ""
            return RESET + self._base
        if self._fence:
            self._base = CODE
            return CODE
        heading, item = _HEADING.match(self._held), _ITEM.match(self._held)
        if heading:
            self._held = self._held[heading.end() :]
            self._base = BOLD
            return BOLD
        if item:
            self._held = self._held[item.end() :]
            return f"{item[1]}{item[2] if item[2][0].isdigit() else '•'} "
        return ""

    def _in_line(self, *, final: bool) -> str | None:
        """Text up to the next mark; None while the mark is not certain."""
        marks = r"\n" if self._fence or self._hidden_line else r"\n|`" if self._code else r"\n|`|\*"
        mark = re.search(marks, self._held)
        text, rest = (self._held, "") if mark is None else (self._held[: mark.start()], self._held[mark.start() :])
        self._held = rest
        text = "" if self._hidden_line else text
        if not rest or text:
            return text
        if rest[0] == "\n":
            return self._end_line()
        if rest[0] == "`":
            self._held = rest[1:]
            self._code = not self._code
            return CODE if self._code else self._style()
        if len(rest) < 3 and not final:  # ** and the character after it
            return None
        if rest.startswith("**") and (self._bold or not rest[2:3].isspace()):
            self._held = rest[2:]
            self._bold = not self._bold
            return BOLD if self._bold else self._style()
        width = 2 if rest.startswith("**") else 1
        self._held = rest[width:]
        return rest[:width]

    def _end_line(self) -> str:
        self._held = self._held[1:]
        self._at_start = True
        hidden, self._hidden_line = self._hidden_line, False
        styled = self._base or self._bold or self._code
        self._base, self._bold, self._code = "", False, False
        return "" if hidden else (RESET if styled else "") + "\n"

    def _style(self) -> str:
        return RESET + self._base + (BOLD if self._bold else "")
