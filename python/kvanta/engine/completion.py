"""One text as it grows: the engine's tokens become text, log-probabilities, and a reason to stop."""

from __future__ import annotations

from typing import NoReturn

from kvanta import _core
from kvanta.constraints.stop_regex import StopPatterns, StopSearch
from kvanta.errors import InputError, RankLostError, ResourceError
from kvanta.outputs import CompletionOutput, FlatLogprobs, Logprob, TokenLogprobs
from kvanta.params.repetition import RepetitionDetector
from kvanta.params.sampling_params import SamplingParams
from kvanta.text.stop_strings import StopAutomaton, StopStrings
from kvanta.text.tokenizer import Tokenizer

FINISH_REASONS = {
    _core.FinishReason.STOP: "stop",
    _core.FinishReason.LENGTH: "length",
    _core.FinishReason.ABORT: "abort",
    _core.FinishReason.TIMEOUT: "timeout",
}


def raise_failure(engine_output: _core.EngineOutput, field: str | None = None) -> NoReturn:
    """Raises the error of a request that the engine failed.

    InputError: its `field` is wrong. RankLostError: no other request can succeed either. ResourceError: all others.
    """
    if engine_output.invalid_input:
        raise InputError(engine_output.error, field)
    kind = ResourceError if engine_output.lost_rank is None else RankLostError
    raise kind(f"the engine failed request {engine_output.id!r}: {engine_output.error}")


def add_logprobs(
    positions: list[TokenLogprobs] | list[TokenLogprobs | None] | FlatLogprobs,
    entries: list[_core.TokenLogprob],
    tokenizer: Tokenizer | None,
) -> None:
    """Adds a position, in the engine's order: the token that stands there first. `tokenizer`: None for no texts."""
    texts = [None if tokenizer is None else tokenizer.token_text(entry.token) for entry in entries]
    if isinstance(positions, FlatLogprobs):
        positions.add(entries, texts)
    else:
        named = zip(entries, texts, strict=True)
        positions.append({entry.token: Logprob(entry.logprob, entry.rank, text) for entry, text in named})


class Completion:
    """One of the `n` texts of a request."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        shown: frozenset[int] = frozenset(),
        stops: StopAutomaton | None = None,
        patterns: StopPatterns | None = None,
    ) -> None:
        """`shown`: special tokens that the text has in any case. `stops`, `patterns`: those of `params`, if there are
        any, which texts share.
        """
        self.output = CompletionOutput(index=index)
        if params.num_logprobs is not None:
            self.output.logprobs = FlatLogprobs() if params.flat_logprobs else []
            self.output.cumulative_logprob = 0.0
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        skip = params.skip_special_tokens
        self._text = tokenizer.detokenizer(prompt, skip_special_tokens=skip, shown=shown)
        self._searches: list[StopStrings | StopSearch] = []
        """What may end the text, in the order in which the text passes them."""
        if stops is not None:
            self._searches.append(StopStrings(stops, params.include_stop_str_in_output))
        if patterns is not None:
            self._searches.append(patterns.search())
        repetition = params.repetition_detection
        self._repetition = None if repetition is None else RepetitionDetector(repetition)
        self._repeats = False

    def take(self, engine_output: _core.EngineOutput) -> str:
        """Adds one step's output; returns the text that is now certain. Raises ResourceError if the engine failed,
        InputError if a grammar turned out too complex.
        """
        output = self.output
        if output.finished:  # a step that the engine had begun before the stop string was found
            return ""
        if engine_output.finish == _core.FinishReason.ERROR:
            # A grammar's limits are reached only within the text.
            raise_failure(engine_output, None if self._params.structured_outputs is None else "structured_outputs")
        tokens = self._until_repetition(engine_output.tokens)
        ends = engine_output.finish != _core.FinishReason.NONE and len(tokens) == len(engine_output.tokens)
        final = ends or self._repeats
        text = "" if tokens or not final else self._new_text([], None, final=True)
        taken = 0
        while taken < len(tokens) and self._found is None:  # accepted drafts may continue after a stop string
            token = tokens[taken]
            output.token_ids.append(token)
            if output.logprobs is not None:
                entries = engine_output.logprobs[taken]
                add_logprobs(output.logprobs, entries, self._tokenizer)
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + entries[0].logprob
            taken += 1
            last = taken == len(tokens)
            text += self._new_text([token], engine_output.stop_token if ends and last else None, final=final and last)
        output.text += text
        output.num_draft_tokens += engine_output.draft_tokens
        output.num_accepted_tokens += min(taken, engine_output.accepted_tokens)
        finished = ends and taken == len(tokens)
        found = self._found
        if found is not None:
            output.finish_reason, output.stop_reason = "stop", found
        elif finished:
            output.finish_reason = FINISH_REASONS[engine_output.finish]
            if engine_output.stop_token is not None and engine_output.stop_token in (self._params.stop_token_ids or ()):
                output.stop_reason = engine_output.stop_token
        elif self._repeats:
            output.finish_reason, output.stop_reason = "repetition", "repetition_detected"
        return text

    @property
    def _found(self) -> str | None:
        """The stop string or expression that ended the text."""
        for search in reversed(self._searches):
            if search.found:
                return search.found
        return None

    def _until_repetition(self, tokens: list[int]) -> list[int]:
        """The tokens up to the one with which the text repeats itself."""
        if self._repetition is not None:
            for index, token in enumerate(tokens, 1):
                repeats = self._repetition.add(token)
                if repeats and len(self.output.token_ids) + index >= self._params.min_tokens:
                    self._repeats = True
                    return tokens[:index]
        return tokens

    def _new_text(self, tokens: list[int], stop_token: int | None, *, final: bool) -> str:
        """The text that is certain with further tokens. `final`: they are the last ones."""
        if self._tokenizer is None:
            return ""
        if stop_token is not None and not self._params.include_stop_str_in_output:
            tokens = [token for token in tokens if token != stop_token]
        text = self._text.add(tokens)
        if final:
            text += self._text.finish()
        if len(self.output.token_ids) > self._params.min_tokens:
            for search in self._searches:
                text = search.add(text, final)
        return text
