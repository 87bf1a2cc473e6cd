"""Beam search over next-token log-probabilities, with the parameters and results of vLLM's LLM.beam_search."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from kvanta.outputs import TokenLogprobs
from kvanta.params.checks import real_number, truth, whole_number
from kvanta.text.prompts import TokenPrompt

MAX_BEAM_WIDTH = 1024
NextTokens = Callable[[list[TokenPrompt]], list[TokenLogprobs]]
"""next_tokens(beams) -> for each, the most likely next tokens: at least 2 * beam_width, or the vocabulary."""


@dataclass(kw_only=True)
class BeamSearchParams:
    """Raises InputError, naming the field and its range, when a value is out of range."""

    beam_width: int
    """Continuations that are kept at each step, and returned."""
    max_tokens: int
    """Maximum new tokens."""
    ignore_eos: bool = False
    """Go on after the model's end token."""
    temperature: float = 0.0
    """No effect, as in vLLM: beams are ranked by the model's own log-probabilities."""
    length_penalty: float = 1.0
    """Exponent of the number of new tokens, which divides a beam's log-probability: above 0 favors longer beams."""
    include_stop_str_in_output: bool = False
    """A beam's tokens include the end-of-sequence token."""
    skip_special_tokens: bool = True
    """Special tokens are not part of the text."""

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        whole_number("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        whole_number("max_tokens", self.max_tokens, 1, 2**31 - 1)
        real_number("temperature", self.temperature, 0.0, math.inf)
        real_number("length_penalty", self.length_penalty, -100.0, 100.0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            truth(name, getattr(self, name))


@dataclass
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]
    """The prompt's tokens and the new ones."""
    cum_logprob: float = 0.0
    """Sum over the new tokens, a final end-of-sequence token included."""
    text: str = ""
    """Text of `tokens`."""
    finish_reason: str | None = None
    """"stop": an end-of-sequence token; "length": max_tokens or the context."""
    stop_reason: int | None = None
    """The end-of-sequence token."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Those of the most likely tokens at the position of every new token, a final end-of-sequence token included."""


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class _Search:
    """The state of one prompt."""

    prompt: TokenPrompt
    live: list[BeamSearchSequence]
    completed: list[tuple[float, BeamSearchSequence]] = field(default_factory=list)


def search(
    prompts: Sequence[TokenPrompt],
    params: BeamSearchParams,
    next_tokens: NextTokens,
    eos_tokens: Collection[int],
    max_model_len: int,
) -> list[BeamSearchOutput]:
    """The `beam_width` best sequences of every prompt; text is left empty. All live beams of a step are one call."""
    searches = [_Search(prompt, [BeamSearchSequence(list(prompt.token_ids))]) for prompt in prompts]
    ends = frozenset() if params.ignore_eos else frozenset(eos_tokens)
    for produced in range(1, params.max_tokens + 1):
        beams = [TokenPrompt(None, beam.tokens, each.prompt.cache_salt) for each in searches for beam in each.live]
        if not beams:
            break
        entries = iter(next_tokens(beams))
        for each in searches:
            _extend(each, [next(entries) for _ in each.live], produced, params, ends)
            longest = min(params.max_tokens, max_model_len - len(each.prompt.token_ids))
            if produced >= longest:
                for beam in each.live:
                    beam.finish_reason = "length"
                    each.completed.append((_score(beam.cum_logprob, produced, params), beam))
                each.live = []
            elif _is_decided(each, produced, longest, params):
                each.live = []
    for each in searches:
        each.completed.sort(key=lambda scored: -scored[0])  # stable: of equal ones the earlier
    return [BeamSearchOutput([beam for _, beam in each.completed[: params.beam_width]]) for each in searches]


def _score(logprob: float, tokens: int, params: BeamSearchParams) -> float:
    """Grows with logprob / tokens**length_penalty, which may be too large or too small for a float."""
    return math.inf if logprob >= 0 else params.length_penalty * math.log(tokens) - math.log(-logprob)


def _extend(
    each: _Search, entries: list[TokenLogprobs], produced: int, params: BeamSearchParams, ends: frozenset[int]
) -> None:
    """Replaces the live beams by the best of their continuations."""
    most = 2 * params.beam_width  # as transformers: enough if every other one ends
    found = [
        (beam.cum_logprob + entry.logprob, beam, token, tokens)
        for beam, tokens in zip(each.live, entries, strict=True)
        for token, entry in tokens.items()
        if entry.rank <= most
    ]
    found.sort(key=lambda one: -one[0])
    each.live = []
    for rank, (logprob, beam, token, position) in enumerate(found[:most]):
        logprobs = [*beam.logprobs, position]
        if token not in ends:
            each.live.append(BeamSearchSequence([*beam.tokens, token], logprob, logprobs=logprobs))
        elif rank < params.beam_width:
            tokens = [*beam.tokens, token] if params.include_stop_str_in_output else beam.tokens
            ended = BeamSearchSequence(tokens, logprob, finish_reason="stop", stop_reason=token, logprobs=logprobs)
            each.completed.append((_score(logprob, produced, params), ended))
        if len(each.live) == params.beam_width:
            break


def _is_decided(each: _Search, produced: int, longest: int, params: BeamSearchParams) -> bool:
    """True when no live beam can become one of the best: its log-probability can only fall."""
    if len(each.completed) < params.beam_width or not each.live:
        return False
    worst = sorted((score for score, _ in each.completed), reverse=True)[params.beam_width - 1]
    best = max(beam.cum_logprob for beam in each.live)
    return max(_score(best, length, params) for length in (produced + 1, longest)) <= worst
