"""The reference's predictions on some passages: computed once, kept on disk, compared with those of a format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvanta.errors import ResourceError
from kvanta.evaluate import reference_store
from kvanta.evaluate.passages import Passage
from kvanta.evaluate.predictions import predictions
from kvanta.evaluate.row_metrics import ReferenceRows, RowMetrics, compare, pack_rows
from kvanta.llm import LLM

Progress = Callable[[int], object]
"""Called with the number of tokens read since the last call."""


@dataclass(frozen=True)
class Reference:
    """Packed predictions of the reference for every evaluated row."""

    passages: list[Passage]
    rows: ReferenceRows
    key: str
    """Its name on disk."""

    def log_probabilities(self) -> list[float]:
        """Log-probabilities of the text's own tokens, nats."""
        return [float(value) for value in self.rows.target]

    def compare(self, llm: LLM, progress: Progress, demoted: float = 0.0) -> list[RowMetrics]:
        """Metrics of another cache on the same passages: one entry per passage. `demoted`: as of predictions()."""
        result = []
        begin = 0
        for passage in self.passages:
            parts = []
            done = 0
            for logits in predictions(llm, passage, demoted):
                rows = slice(begin + done, begin + done + len(logits))
                targets = passage.targets[done : done + len(logits)]
                parts.append(compare(self.rows[rows], targets, logits))
                progress(len(logits) + (passage.first + 1 if done == 0 else 0))
                done += len(logits)
            begin += passage.rows
            result.append(RowMetrics.join(parts))
        return result


def key_of(identity: dict[str, Any]) -> str:
    """The name of a reference on disk."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]


def make_reference(
    identity: dict[str, Any],
    vocab: int,
    passages: list[Passage],
    open_engine: Callable[[], LLM],
    progress: Progress,
) -> Reference:
    """Reads it from disk if it is there, whole and of the same passages; else computes and keeps it.

    `open_engine` is called only to compute. Raises ResourceError if it cannot be kept.
    """
    key = key_of({**identity, "passages": [[passage.tokens, passage.first] for passage in passages]})
    found = reference_store.load(key, passages, vocab)
    if found is None:
        found = save_reference(key, vocab, passages, open_engine(), progress)
    return Reference(*found, key)


def save_reference(
    key: str, vocab: int, passages: list[Passage], llm: LLM, progress: Progress
) -> tuple[list[Passage], ReferenceRows]:
    """Computes the reference and keeps it as `key`, unless another process was as fast. Raises ResourceError."""
    reference_store.save(key, passages, vocab, _compute(llm, passages, progress))
    found = reference_store.load(key, passages, vocab)
    if found is None:
        raise ResourceError(f"the reference {key} was written but cannot be read back; is the disk in order?")
    return found


def _compute(llm: LLM, passages: list[Passage], progress: Progress) -> Iterator[ReferenceRows]:
    for passage in passages:
        done = 0
        for logits in predictions(llm, passage):
            yield pack_rows(passage.targets[done : done + len(logits)], logits)
            progress(len(logits) + (passage.first + 1 if done == 0 else 0))
            done += len(logits)
