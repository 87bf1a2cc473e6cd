"""Finds stop strings in a stream of text, across the borders of tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on as soon as it cannot be part of a stop string any more."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = list(stops)
        self._include = include_in_output
        self._held = ""
        self.found: str | None = None

    def add(self, text: str, final: bool = False) -> str:
        """The text that may be shown now. Once a stop string was `found`, what follows it is dropped.

        The stop string that ends first counts; the longest, if several end together.
        """
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        hits = [(position + len(stop), position, stop) for stop in self._stops if (position := text.find(stop)) >= 0]
        if hits:
            end, begin, self.found = min(hits)
            self._held = ""
            return text[:end] if self._include else text[:begin]
        keep = 0 if final else self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
