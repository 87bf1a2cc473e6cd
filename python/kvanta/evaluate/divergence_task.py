"""Task "kl": how far a format's predictions on a text are from the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvanta.evaluate.passages import Passage
from kvanta.evaluate.reference import Progress, Reference, make_reference
from kvanta.evaluate.summary import perplexity, summarize
from kvanta.llm import LLM


class DivergenceTask:
    """Teacher-forced over windows of a text, of which the second halves are evaluated."""

    def __init__(self, passages: list[Passage], identity: dict[str, Any], vocab: int) -> None:
        self._passages = passages
        self._identity = identity
        self._vocab = vocab
        self._reference: Reference | None = None
        self._perplexity = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of all windows."""
        return sum(len(passage.tokens) for passage in self._passages)

    def prepare(self, open_engine: Callable[[], LLM], progress: Progress) -> dict[str, Any]:
        """ppl: the reference's perplexity."""
        self._reference = make_reference(self._identity, self._vocab, self._passages, open_engine, progress)
        self._perplexity = perplexity(self._reference.log_probabilities())
        return {"ppl": self._perplexity}

    def measure(self, llm: LLM, progress: Progress, demoted: float = 0.0) -> dict[str, Any]:
        """The figures of kvanta.evaluate.summary. `demoted`: as of predictions()."""
        assert self._reference is not None, "prepare comes first"
        return summarize(self._reference.compare(llm, progress, demoted), self._perplexity)
