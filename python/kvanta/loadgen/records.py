"""Outcome of each request. Times are seconds on the clock of the run, whose start is 0."""

from __future__ import annotations

from dataclasses import dataclass, field

# Kinds of errors, as the report counts them; in addition http_NNN for a status.
ERROR_KINDS = {
    "connect": "no connection: refused, unknown host, or none within the time-out",
    "timeout": "the answer took longer than --timeout",
    "disconnected": "the server closed the connection before the answer was complete",
    "bad_response": "the answer is not an event stream in OpenAI's format",
    "server_error": "an error inside the stream",
    "queue_full": "the engine's queue was full (bench engine)",
    "refused": "the engine took it for wrong (bench engine)",
    "engine_error": "the engine ended it with an error (bench engine)",
    "http_NNN": "the server answered with this status",
}


class LoadError(Exception):
    """A request that has failed; `kind` is one of ERROR_KINDS."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = " ".join(detail.split())[:300]


@dataclass
class RequestRecord:
    """One request and its answer."""

    index: int
    due_s: float
    """Scheduled time of sending."""
    input_tokens: int = 0
    """Number counted by the server; before its answer, the planned one."""
    wanted_tokens: int = 0
    ready_s: float = 0.0
    """When the load generator got to it: what is beyond due_s is the generator's own slowness."""
    sent_s: float = 0.0
    """When it was sent; what is beyond ready_s is the wait for one of --concurrency places."""
    news_s: list[float] = field(default_factory=list)
    """Moments at which tokens came."""
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the server says it found in its prefix cache."""
    done_s: float | None = None
    error: LoadError | None = None

    @property
    def succeeded(self) -> bool:
        """True for a complete answer with at least one token."""
        return self.error is None and self.done_s is not None and bool(self.news_s)

    @property
    def ttft_s(self) -> float:
        """From sending to the first token. Only of a request that has succeeded, as the others here."""
        return self.news_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From sending to the last token."""
        return self.news_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None of answers of one token."""
        return (self.news_s[-1] - self.news_s[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive chunks."""
        return [after - before for before, after in zip(self.news_s, self.news_s[1:], strict=False)]
