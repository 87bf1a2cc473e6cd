"""LLM.beam_search: the best of all sequences, on the model and on a chain of tokens that is small enough to list."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal

import numpy as np
import pytest
from numpy.typing import NDArray
from stories import PROMPT

from kvanta import LLM, BeamSearchParams
from kvanta.engine.beam_search import search
from kvanta.errors import InputError
from kvanta.outputs import Logprob, TokenLogprobs
from kvanta.text.prompts import TokenPrompt

_EOS = 0
THREE = TokenPrompt(None, [3])
# Rows: next-token probabilities after each token.
_CHAIN = np.array([[0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.6, 0.1], [0.3, 0.3, 0.1, 0.3], [0.55, 0.15, 0.2, 0.1]])


def _next_tokens(beams: list[TokenPrompt]) -> list[TokenLogprobs]:
    entries = []
    for beam in beams:
        row = np.log(_CHAIN[beam.token_ids[-1]])
        order = np.argsort(-row, kind="stable")
        entries.append({int(token): Logprob(float(row[token]), rank + 1, "") for rank, token in enumerate(order)})
    return entries


def _all_sequences(start: int, tokens: int) -> list[tuple[float, int, tuple[int, ...]]]:
    """(log-probability, new tokens, sequence without its end) of every sequence that ends, or has all tokens."""
    found = []
    for length in range(1, tokens + 1):
        for new in itertools.product(range(len(_CHAIN)), repeat=length):
            if _EOS in new[:-1] or (new[-1] != _EOS and length < tokens):
                continue
            logprob = sum(math.log(_CHAIN[a][b]) for a, b in itertools.pairwise((start, *new)))
            found.append((logprob, length, (start, *(new[:-1] if new[-1] == _EOS else new))))
    return found


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5, -1.0])
def test_a_wide_beam_finds_the_best_of_all_sequences(length_penalty: float) -> None:
    params = BeamSearchParams(beam_width=64, max_tokens=3, length_penalty=length_penalty)
    (output,) = search([TokenPrompt(None, [1])], params, _next_tokens, [_EOS], 100)
    expected = sorted((p / n**length_penalty for p, n, _ in _all_sequences(1, 3)), reverse=True)
    scores = []
    lengths = {(tokens, round(p, 9)): n for p, n, tokens in _all_sequences(1, 3)}
    for beam in output.sequences:
        length = lengths[tuple(beam.tokens), round(beam.cum_logprob, 9)]
        assert beam.finish_reason == ("stop" if beam.stop_reason == _EOS else "length")
        scores.append(beam.cum_logprob / length**length_penalty)
    assert scores == pytest.approx(expected[:64])


@pytest.mark.parametrize(("length_penalty", "max_tokens"), [(100.0, 1300), (-100.0, 1800)])
def test_scores_beyond_floats(length_penalty: float, max_tokens: int) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=max_tokens, length_penalty=length_penalty)
    (output,) = search([TokenPrompt(None, [1])], params, _next_tokens, [_EOS], 4000)
    lengths = [len(beam.tokens) - 1 + (beam.finish_reason == "stop") for beam in output.sequences]
    scores = [
        Decimal(beam.cum_logprob) / Decimal(length) ** Decimal(length_penalty)
        for beam, length in zip(output.sequences, lengths, strict=True)
    ]
    assert scores == sorted(scores, reverse=True)
    assert lengths[0] == (1 if length_penalty < 0 else max_tokens)


def test_ends_and_the_context() -> None:
    shown = BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=0.0, include_stop_str_in_output=True)
    (output,) = search([THREE], shown, _next_tokens, [_EOS], 100)
    assert output.sequences[0].tokens == [3, _EOS]  # 0.55: no other sequence can have more
    unending = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    (endless,) = search([THREE], unending, _next_tokens, [_EOS], 3)
    assert {len(beam.tokens) for beam in endless.sequences} == {3}
    assert {beam.finish_reason for beam in endless.sequences} == {"length"}


def test_the_model_against_all_pairs(llm: LLM) -> None:
    """Every pair of next tokens, scored by LLM.logits."""
    vocab = llm.model_info.vocab
    prompt = llm.tokenizer.encode(PROMPT)

    def logprobs(tokens: list[int]) -> NDArray[np.float64]:
        row = llm.logits(tokens)[-1].astype(np.float64)
        return np.asarray(row - row.max() - np.log(np.exp(row - row.max()).sum()))

    first = logprobs(prompt)
    candidates = np.argsort(-first)[:12]
    scores = np.stack([first[token] + logprobs([*prompt, int(token)]) for token in candidates])
    best = np.argsort(-scores, axis=None)[:4]
    assert scores.flat[best[-1]] > first[np.argsort(-first)[12]]  # no other first token can do better
    params = BeamSearchParams(beam_width=12, max_tokens=2, ignore_eos=True)
    (output,) = llm.beam_search(PROMPT, params)
    assert len(output.sequences) == 12
    for beam, index in zip(output.sequences, best, strict=False):
        assert beam.tokens == [*prompt, int(candidates[index // vocab]), int(index % vocab)]
        assert beam.cum_logprob == pytest.approx(float(scores.flat[index]), abs=1e-4)
        assert beam.text.startswith(PROMPT)


def test_one_beam_is_greedy_and_prompts_do_not_meet(llm: LLM, story: list[int]) -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=8)
    alone = llm.beam_search([PROMPT], params)
    assert alone[0].sequences[0].tokens == [*llm.tokenizer.encode(PROMPT), *story[:8]]
    together = llm.beam_search([PROMPT, "The dog"], params)
    assert together[0] == alone[0]
    assert together[1].sequences[0].tokens != alone[0].sequences[0].tokens


@pytest.mark.parametrize("wrong", [{"beam_width": 0}, {"max_tokens": 0}, {"length_penalty": math.nan}])
def test_parameters_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **wrong})  # type: ignore[arg-type]
