"""Results of LLM: texts, embeddings, scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from kvanta import _core


@dataclass(slots=True)  # there may be a million, and the collector of garbage looks at each object
class Logprob:
    """One token's log-probability (natural logarithm) at one position."""

    logprob: float
    rank: int
    """1: the most likely token."""
    decoded_token: str | None
    """Text of the token; None with detokenize=False."""


class Finished(int):
    """0 or 1, which may also be called: in vLLM, `finished` of a CompletionOutput is a method."""

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))


_FINISHED, _UNFINISHED = Finished(True), Finished(False)

TokenLogprobs = dict[int, Logprob]
"""Log-probabilities by token id: first the token at this position, then the most likely ones."""


@dataclass
class FlatLogprobs(Sequence[TokenLogprobs]):
    """A sequence of TokenLogprobs in a few lists, as vLLM's class has it. The first of a prompt is empty."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    """Ends by position: its entries are [start, end) of the lists below."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def add(self, entries: Iterable[_core.TokenLogprob], texts: Iterable[str | None]) -> None:
        """Adds a position, with the texts of its tokens."""
        self.start_indices.append(len(self.token_ids))
        self.decoded_tokens += texts
        for entry in entries:
            self.token_ids.append(entry.token)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, position: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, position: slice) -> FlatLogprobs: ...

    def __getitem__(self, position: int | slice) -> TokenLogprobs | FlatLogprobs:
        """The entries of a position, or a copy of several."""
        if isinstance(position, int):
            return {
                self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
                for i in range(self.start_indices[position], self.end_indices[position])
            }
        starts, ends = self.start_indices[position], self.end_indices[position]
        low, high = min(starts, default=0), max(ends, default=0)
        return FlatLogprobs(
            [start - low for start in starts],
            [end - low for end in ends],
            self.token_ids[low:high],
            self.logprobs[low:high],
            self.ranks[low:high],
            self.decoded_tokens[low:high],
        )


@dataclass
class KvCacheLevels:
    """Levels that a text was computed with, with a kv_cache_floor (docs/pressure.md)."""

    levels: list[str]
    """Formats of the levels."""
    pages: list[int]
    """Pages by level, at the end of the text; without those that are always exact."""
    events: list[dict[str, Any]]
    """Steps to later levels. With them as SamplingParams.kv_cache_events, the same request gives the same bits."""
    replayable: bool
    """False: the text was computed again, after a preemption, with other events than before."""


@dataclass
class CompletionOutput:
    """One text that follows a prompt."""

    index: int
    """Number of the text, from 0; below SamplingParams.n."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """New tokens, the one that ended the text included."""
    cumulative_logprob: float | None = None
    """Sum of the tokens' log-probabilities; None without `logprobs`."""
    logprobs: list[TokenLogprobs] | FlatLogprobs | None = None
    """Log-probabilities of every new token, as SamplingParams.logprobs requests."""
    finish_reason: str | None = None
    """"stop": a stop string, expression or token, or the end of the sequence; "length": max_tokens or the context;
    "repetition"; "abort"; "timeout".
    """
    stop_reason: str | int | None = None
    """The stop string, expression or token that ended it; None at an end-of-sequence token."""
    num_draft_tokens: int = 0
    """Draft tokens that were verified; 0 without speculative decoding."""
    num_accepted_tokens: int = 0
    """Tokens of the text that were draft tokens."""
    kv_cache: KvCacheLevels | None = None
    """Levels of the cache that it was computed with; None without a kv_cache_floor, and until it is finished."""

    @property
    def finished(self) -> Finished:
        """True when the text is complete; `finished()`, as in vLLM, is the same."""
        return _UNFINISHED if self.finish_reason is None else _FINISHED


@dataclass
class RequestOutput:
    """All texts of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | FlatLogprobs | None = None
    """Per prompt token; None for the first."""
    num_cached_tokens: int = 0
    """Prompt tokens that were taken from the prefix cache."""

    @property
    def finished(self) -> bool:
        """True when every text is finished."""
        return all(output.finished for output in self.outputs)


@dataclass
class PoolingOutput:
    """A pooled hidden state."""

    data: NDArray[np.float32]
    """[hidden_size], or the first `dimensions`."""


@dataclass
class PoolingRequestOutput:
    """Result of LLM.encode for a prompt."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = False


@dataclass
class EmbeddingOutput:
    """A pooled hidden state, as a list."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of dimensions."""
        return len(self.embedding)


@dataclass
class EmbeddingRequestOutput:
    """Result of LLM.embed for a prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass
class ScoringOutput:
    """Similarity of two texts."""

    score: float
    """Cosine of the embeddings, in [-1, 1]."""


@dataclass
class ScoringRequestOutput:
    """Result of LLM.score for a pair of texts."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """Token ids of both texts, one after the other."""
    num_cached_tokens: int = 0
    finished: bool = True
