"""One prompt in the engine whose hidden states are pooled; similarity of embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvanta import _core
from kvanta.engine.completion import FINISH_REASONS, raise_failure
from kvanta.outputs import PoolingOutput, PoolingRequestOutput
from kvanta.params.pooling_params import PoolingParams
from kvanta.text.prompts import TokenPrompt


class Embedding:
    """The engine's request NAME."""

    def __init__(self, name: str, prompt: TokenPrompt, params: PoolingParams) -> None:
        """`params`: without None for what has a default."""
        self.name = name
        self.output = PoolingRequestOutput(
            request_id=name,
            outputs=PoolingOutput(np.empty(0, dtype=np.float32)),
            prompt_token_ids=list(prompt.token_ids),
        )
        self.finish_reason: str | None = None
        self._params = params
        self._cache_salt = prompt.cache_salt

    @property
    def names(self) -> list[str]:
        """The engine's requests."""
        return [self.name]

    def finished(self, _name: str) -> bool:
        """True when there is no more to come."""
        return self.finish_reason is not None

    def add_to(
        self,
        engine: _core.Engine,
        cache_salt: str = "",
        priority: int = 0,
        timeout_seconds: float = 0.0,
        user: str = "",
    ) -> None:
        """Queues the prompt. `cache_salt`: instead of the prompt's own. Raises InputError or QueueFullError."""
        sampling = _core.SamplingParams()
        sampling.skip_reading_prefix_cache = bool(self._params.skip_reading_prefix_cache)
        pooling = self._params.engine_params()
        prompt, salt = self.output.prompt_token_ids, cache_salt or self._cache_salt
        engine.add(self.name, prompt, sampling, salt, priority, timeout_seconds, None, pooling, user=user)

    def take(self, engine_output: _core.EngineOutput) -> str:
        """Takes the engine's output; there is no text. Raises ResourceError if the engine failed."""
        if engine_output.finish == _core.FinishReason.ERROR:
            raise_failure(engine_output)
        self.finish_reason = FINISH_REASONS.get(engine_output.finish)
        self.output.num_cached_tokens = engine_output.cached_tokens
        self.output.outputs.data = engine_output.embedding
        self.output.finished = self.finish_reason == "stop"
        return ""


def paired(
    outputs: Sequence[PoolingRequestOutput], left: int
) -> list[tuple[PoolingRequestOutput, PoolingRequestOutput]]:
    """Pairs of the first `left` outputs with the others: as many, or one with each."""
    firsts, others = outputs[:left], outputs[left:]
    return list(zip(firsts if left == len(others) else [*firsts] * len(others), others, strict=True))


def similarity(a: PoolingRequestOutput, b: PoolingRequestOutput) -> float:
    """Cosine similarity of two embeddings."""
    return cosine(a.outputs.data, b.outputs.data)


def cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Cosine similarity, in -1..1; 0 for zeros."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    norms = float(np.linalg.norm(x) * np.linalg.norm(y))
    return min(1.0, max(-1.0, float(x @ y) / norms)) if norms else 0.0
