"""Interface of the kinds of evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvanta.evaluate.reference import Progress
from kvanta.llm import LLM


class Task(Protocol):
    """One kind of evaluation: first the reference, once, then one format after another."""

    @property
    def tokens(self) -> int:
        """Tokens read or written per format, for the progress bar."""

    def prepare(self, open_engine: Callable[[], LLM], progress: Progress) -> dict[str, Any]:
        """Figures of the reference, whose engine is opened only if they are not kept on disk."""

    def measure(self, llm: LLM, progress: Progress) -> dict[str, Any]:
        """Figures of one format."""
