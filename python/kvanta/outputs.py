"""Results of LLM.generate."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)  # there may be a million, and the collector of garbage looks at each object
class Logprob:
    """One token's log-probability (natural logarithm) at one position."""

    logprob: float
    rank: int
    """1: the most likely token."""
    decoded_token: str


TokenLogprobs = dict[int, Logprob]
"""By token id: the token that stands there, first, and the most likely ones."""


@dataclass
class CompletionOutput:
    """One text that follows a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    """"stop": a stop string or token, or the end of the sequence; "length": max_tokens or the context; "abort";
    "timeout".
    """
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it; None at an end-of-sequence token."""
    num_draft_tokens: int = 0
    """Draft tokens that were verified; 0 without speculative decoding."""
    num_accepted_tokens: int = 0
    """Tokens of the text that were draft tokens."""

    @property
    def finished(self) -> bool:
        """True when the text is complete."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """All texts of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Per prompt token; None for the first."""
    num_cached_tokens: int = 0
    """Prompt tokens that were taken from the prefix cache."""

    @property
    def finished(self) -> bool:
        """True when every text is finished."""
        return all(output.finished for output in self.outputs)
