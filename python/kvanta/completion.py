"""One text as it grows: the engine's tokens become text, log-probabilities, and a reason to stop."""

from __future__ import annotations

from kvanta import _core
from kvanta.errors import InputError, ResourceError
from kvanta.outputs import CompletionOutput, Logprob, TokenLogprobs
from kvanta.sampling_params import SamplingParams
from kvanta.stop_strings import StopAutomaton, StopStrings
from kvanta.structured_output import GRAMMAR_FAILED
from kvanta.tokenizer import Tokenizer

_FINISH = {
    _core.FinishReason.STOP: "stop",
    _core.FinishReason.LENGTH: "length",
    _core.FinishReason.ABORT: "abort",
    _core.FinishReason.TIMEOUT: "timeout",
}


def named_logprobs(entries: list[_core.TokenLogprob], tokenizer: Tokenizer) -> TokenLogprobs:
    """By token id, in the engine's order: the token that stands there first."""
    return {entry.token: Logprob(entry.logprob, entry.rank, tokenizer.token_text(entry.token)) for entry in entries}


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
    ) -> None:
        """`shown`: special tokens that the text has in any case. `stops`: those of `params`, which texts share."""
        self.output = CompletionOutput(index=index)
        if params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self._params = params
        self._tokenizer = tokenizer
        skip = params.skip_special_tokens
        self._text = tokenizer.detokenizer(prompt, skip_special_tokens=skip, shown=shown)
        self._stops = StopStrings(stops or params.stop_strings, params.include_stop_str_in_output)

    def take(self, engine_output: _core.EngineOutput) -> str:
        """Adds one step's output; returns the text that is now certain. Raises ResourceError if the engine failed,
        InputError if a form turned out too complex.
        """
        output = self.output
        if output.finished:  # a step that the engine had begun before the stop string was found
            return ""
        if engine_output.finish == _core.FinishReason.ERROR:
            _, marked, reason = engine_output.error.partition(GRAMMAR_FAILED)
            if marked:  # the form's own limits are reached only within the text
                raise InputError(f"structured_outputs: {marked}{reason}")
            raise ResourceError(f"the engine failed request {engine_output.id!r}: {engine_output.error}")
        finished = engine_output.finish != _core.FinishReason.NONE
        tokens = engine_output.tokens
        logprobs = None if output.logprobs is None else engine_output.logprobs
        text = "" if tokens or not finished else self._add([], final=True)
        taken = 0
        while taken < len(tokens) and self._stops.found is None:  # accepted drafts may go on behind a stop string
            token = tokens[taken]
            output.token_ids.append(token)
            if output.logprobs is not None and logprobs is not None:
                output.logprobs.append(named_logprobs(logprobs[taken], self._tokenizer))
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprobs[taken][0].logprob
            taken += 1
            ends = finished and taken == len(tokens)
            hidden = ends and token == engine_output.stop_token and not self._params.include_stop_str_in_output
            text += self._add([] if hidden else [token], final=ends)
        output.text += text
        output.num_draft_tokens += engine_output.draft_tokens
        output.num_accepted_tokens += min(taken, engine_output.accepted_tokens)
        if self._stops.found is not None:
            output.finish_reason, output.stop_reason = "stop", self._stops.found
        elif finished:
            output.finish_reason = _FINISH[engine_output.finish]
            if engine_output.stop_token is not None and engine_output.stop_token in (self._params.stop_token_ids or ()):
                output.stop_reason = engine_output.stop_token
        return text

    def _add(self, tokens: list[int], *, final: bool) -> str:
        """The text that is certain with these tokens, up to a stop string. `final`: none follows."""
        text = self._text.add(tokens)
        if final:
            text += self._text.finish()
        if len(self.output.token_ids) > self._params.min_tokens:
            text = self._stops.add(text, final=final)
        return text
