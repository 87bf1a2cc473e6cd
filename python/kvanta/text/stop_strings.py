"""Finds stop strings in a stream of text, across the borders of tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """Aho-Corasick automaton of a request's stop strings; its texts share it. State 0: nothing of any has come.

    A state is the longest end of the text that a stop string begins with. A character costs the same for one stop
    string and for many.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: dict[tuple[int, str], int] = {}
        """(state, character) -> state, where the beginning grows."""
        self.fallback = [0]
        """The next shorter beginning that is an end of it, by state."""
        self.depth = [0]
        """Number of characters, by state."""
        self.found: list[str | None] = [None]
        """The longest stop string that ends here, by state."""
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.next.get((state, character))
            if following is None:
                following = self.next[state, character] = len(self.depth)
                self.fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        edges: dict[int, list[tuple[str, int]]] = {}
        for (state, character), following in self.next.items():
            edges.setdefault(state, []).append((character, following))
        queue = deque(following for _, following in edges.get(0, ()))
        while queue:  # by depth: fallbacks are shorter
            state = queue.popleft()
            for character, following in edges.get(state, ()):
                shorter = self.fallback[following] = self.step(self.fallback[state], character)
                if self.found[following] is None:
                    self.found[following] = self.found[shorter]
                queue.append(following)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        following = self.next.get((state, character))
        while following is None and state:
            state = self.fallback[state]
            following = self.next.get((state, character))
        return following or 0


class StopStrings:
    """Passes text on as soon as it can no longer be part of a stop string. Looks at every character once."""

    def __init__(self, stops: Sequence[str] | StopAutomaton, include_in_output: bool = False) -> None:
        if not isinstance(stops, StopAutomaton):
            stops = StopAutomaton(stops)
        self._automaton = stops
        self._include = include_in_output
        self._state = 0
        self._held = ""
        """Text that is the beginning of a stop string: as long as the depth of the state."""
        self.found: str | None = None

    def add(self, text: str, final: bool = False) -> str:
        """The text that may be shown now. Once a stop string was `found`, what follows it is dropped.

        The stop string that ends first wins; the longest, if several end together.
        """
        if self.found is not None:
            return ""
        automaton, state = self._automaton, self._state
        if not automaton.next:
            return text
        held, text = len(self._held), self._held + text
        for end in range(held + 1, len(text) + 1):
            state = automaton.step(state, text[end - 1])
            self.found = automaton.found[state]
            if self.found is not None:
                self._held = ""
                return text[:end] if self._include else text[: end - len(self.found)]
        keep = 0 if final else automaton.depth[state]
        self._state = state
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
