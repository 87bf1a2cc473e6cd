"""Text that comes in pieces: its marks are found wherever the pieces were cut."""

from __future__ import annotations

from collections.abc import Iterator

_PIECE = 4096


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that `mark` begins with."""
    return next((n for n in range(min(len(text), len(mark)), 0, -1) if mark.startswith(text[-n:])), 0)


def pieces(text: str) -> Iterator[str]:
    """The text in pieces: taking a mark out of a buffer copies the rest of it."""
    for begin in range(0, len(text), _PIECE):
        yield text[begin : begin + _PIECE]


class TextBuffer:
    """Text that has come and has not been taken. No mark of a search may be the beginning of another one."""

    def __init__(self) -> None:
        self.text = ""
        self._marks: tuple[str, ...] = ()
        self._searched = 0
        """No mark of `_marks` begins before this place."""

    def add(self, text: str) -> None:
        """Appends the next piece."""
        self.text += text

    def take(self, length: int | None = None) -> str:
        """Removes the first characters and returns them; None: all."""
        end = len(self.text) if length is None else length
        taken, self.text = self.text[:end], self.text[end:]
        self._searched = 0
        return taken

    def put_back(self, text: str) -> None:
        """Makes what was taken last the beginning again."""
        self.text = text + self.text
        self._searched = 0

    def skip_space(self) -> None:
        """Removes white space from the beginning."""
        self.take(len(self.text) - len(self.text.lstrip()))

    def find(self, marks: tuple[str, ...]) -> tuple[int, str] | None:
        """The place of the first mark, and the mark."""
        begin = self._searched if marks == self._marks else 0
        hits = [(at, mark) for mark in marks if (at := self.text.find(mark, begin)) >= 0]
        if hits:
            return min(hits)
        self._marks = marks
        self._searched = max(begin, len(self.text) - max(map(len, marks)) + 1)
        return None

    def take_before(self, marks: tuple[str, ...], *, final: bool) -> tuple[str, str]:
        """Removes the text before the first mark, and the mark, and returns both.

        Without a mark: the text that cannot be the beginning of one, or with `final` all of it, and "".
        """
        hit = self.find(marks)
        if hit is None:
            kept = 0 if final else max(overlap(self.text, mark) for mark in marks)
            return self.take(len(self.text) - kept), ""
        before = self.take(hit[0])
        return before, self.take(len(hit[1]))

    def may_become(self, *marks: str) -> bool:
        """True if the text is the beginning of one of the marks, or nothing yet."""
        return any(mark.startswith(self.text) for mark in marks)
