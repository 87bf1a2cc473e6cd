"""One prompt in the engine: its texts, one engine request each."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from kvanta import _core
from kvanta.constraints.stop_regex import StopPatterns
from kvanta.constraints.structured_output import ConstraintRecipe, GrammarCompiler, TextShape
from kvanta.constraints.token_mask import bad_word_tokens
from kvanta.engine.completion import Completion, add_logprobs
from kvanta.options.ages import levels_of
from kvanta.outputs import FlatLogprobs, KvCacheLevels, RequestOutput, TokenLogprobs
from kvanta.params.kv_cache_events import engine_events, shown_events
from kvanta.params.sampling_params import SamplingParams
from kvanta.text.prompts import TokenPrompt
from kvanta.text.stop_strings import StopAutomaton
from kvanta.text.tokenizer import Tokenizer

_NONE: frozenset[int] = frozenset()
_COMPUTED = (_core.FinishReason.STOP, _core.FinishReason.LENGTH)
"""Ends of requests whose prompt has been computed."""


class Generation:
    """The `n` texts of one prompt; text i is the engine's request "NAME-i".

    Compiling a grammar may take seconds. Raises InputError when it cannot be used.
    """

    def __init__(
        self,
        name: str,
        prompt: TokenPrompt,
        params: SamplingParams,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
        shape: TextShape | None = None,
        *,
        defer_prompt_logprobs: bool = False,
    ) -> None:
        """`defer_prompt_logprobs`: until `name_prompt_logprobs` is called, because they may be many."""
        self.params = params
        self._cache_salt = prompt.cache_salt
        self._deferred = defer_prompt_logprobs
        self._first_output: _core.EngineOutput | None = None
        self._levels: list[str] = []
        self.awaits_prompt_logprobs = params.prompt_logprobs is not None
        """Until they have come: with the first token of text 0, before which other texts may have tokens."""
        shown = shape.shown if shape else _NONE
        stops = StopAutomaton(params.stop_strings) if params.stop_strings else None
        patterns = StopPatterns(params.stop_regex) if params.stop_regex else None
        self.completions = {
            f"{name}-{index}": Completion(index, prompt.token_ids, params, tokenizer, shown, stops, patterns)
            for index in range(params.n)
        }
        self.output = RequestOutput(
            request_id=name,
            prompt=prompt.text,
            prompt_token_ids=list(prompt.token_ids),
            outputs=[completion.output for completion in self.completions.values()],
        )
        self._tokenizer = tokenizer
        words = bad_word_tokens(params.bad_words, tokenizer) if params.bad_words else []
        constrained = params.structured_outputs or words or params.allowed_token_ids
        recipe = ConstraintRecipe(prompt, params, words, shape)
        self._constraints = {
            request: grammars.constraint(recipe.matcher(tokenizer, grammars), recipe)
            for request in self.completions
            if constrained or params.thinking_token_budget is not None
        }

    @property
    def names(self) -> Iterable[str]:
        """The engine's requests."""
        return self.completions

    def finished(self, name: str) -> bool:
        """True when one of them has no more to come."""
        return bool(self.completions[name].output.finished)

    def add_to(
        self,
        engine: _core.Engine,
        seeds: random.Random,
        cache_salt: str = "",
        priority: int = 0,
        timeout_seconds: float = 0.0,
        user: str = "",
    ) -> None:
        """Queues every text. `seeds`: for parameters without one. `cache_salt`: instead of the prompt's.

        `user`: whose part of the tokens the texts take, with the option fair_by.

        Raises InputError on the first text, QueueFullError on any.
        """
        self._levels = levels_of(engine.config.kv_cache_dtype)
        prompt, salt = self.output.prompt_token_ids, cache_salt or self._cache_salt
        max_new_tokens = max(1, engine.config.max_model_len - len(prompt))
        for index, name in enumerate(self.completions):
            seed = seeds.getrandbits(64) if self.params.seed is None else (self.params.seed + index) % 2**64
            sampling = _engine_params(self.params, index, seed, max_new_tokens)
            constraint = self._constraints.get(name)
            engine.add(name, prompt, sampling, salt, priority, timeout_seconds, constraint, user=user)

    def take(self, engine_output: _core.EngineOutput) -> str:
        """Adds one step's output; returns the text that is now certain. Raises ResourceError if the engine failed."""
        completion = self.completions[engine_output.id]
        if completion.output.index == 0:
            self.output.num_cached_tokens = max(self.output.num_cached_tokens, engine_output.cached_tokens)
            if engine_output.tokens or engine_output.finish != _core.FinishReason.NONE:
                # They come with the first token, or with the end of a text for which no token is allowed.
                if self.awaits_prompt_logprobs and (engine_output.tokens or engine_output.finish in _COMPUTED):
                    self._first_output = engine_output
                    if not self._deferred:
                        self.name_prompt_logprobs()
                self.awaits_prompt_logprobs = False
        text = completion.take(engine_output)
        if engine_output.kv_cache is not None and completion.output.finished and completion.output.kv_cache is None:
            record = engine_output.kv_cache
            completion.output.kv_cache = KvCacheLevels(
                self._levels, record.pages, shown_events(record.events), record.is_replayable
            )
        return text

    def name_prompt_logprobs(self) -> None:
        """Reads the prompt's log-probabilities into the output, if they have come and have not been read."""
        source, self._first_output = self._first_output, None
        if source is not None:
            tokenizer = self._tokenizer if self.params.detokenize else None
            found: list[TokenLogprobs | None] | FlatLogprobs = FlatLogprobs() if self.params.flat_logprobs else []
            for entries in source.prompt_logprobs:
                add_logprobs(found, entries, tokenizer)
            if isinstance(found, list):
                found[0] = None  # of the first token
            self.output.prompt_logprobs = found


_ENGINE_FIELDS = [
    name
    for name in SamplingParams.__dataclass_fields__
    if hasattr(_core.SamplingParams, name) and name != "kv_cache_events"
]


def _engine_params(params: SamplingParams, index: int, seed: int, max_new_tokens: int) -> _core.SamplingParams:
    """Parameters of text `index`; fields that are None keep the engine's defaults."""
    sampling = _core.SamplingParams()
    for name in _ENGINE_FIELDS:
        value = getattr(params, name)
        if value is not None:
            setattr(sampling, name, list(value.items()) if isinstance(value, Mapping) else value)
    if params.kv_cache_events is not None:
        sampling.kv_cache_events = engine_events(params.kv_cache_events)
    if params.top_p == 0:  # the smallest nucleus there is
        sampling.top_k, sampling.top_p = 1, 1.0
    sampling.seed = seed
    if params.max_tokens is None:
        sampling.max_tokens = max_new_tokens
    if params.logprob_token_ids:  # instead of the most likely ones
        sampling.logprobs = 0
    if index > 0:  # once per prompt
        sampling.prompt_logprobs = -1
    return sampling
