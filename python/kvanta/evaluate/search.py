"""--search: schemes per layer, K and V apart, of least divergence within budgets of bits per element.

Each side of each layer is quantized alone, all else exact; with the divergences of one side in all layers at once these
give divergences that add up (layer_divergences), and dynamic programming chooses. The best uniform scheme of a budget
competes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvanta import _core, formats
from kvanta.errors import InputError
from kvanta.evaluate.allocation import Choice, allocate, undominated
from kvanta.evaluate.divergence_log import DivergenceLog
from kvanta.evaluate.engine_factory import EngineFactory
from kvanta.evaluate.layer_divergence import layer_divergences
from kvanta.evaluate.passages import Passage
from kvanta.evaluate.reference import Progress, key_of, make_reference
from kvanta.evaluate.reference_store import folder_of
from kvanta.options.scheme_file import join_layers
from kvanta.terminal.progress import progress_bar

_SIDES = ("k", "v")
_EXACT = "bf16"
_RECURRENT = "recurrent"
_OF_KEYS = re.compile(r"[+-](?:query|mean|outliers=\d+)")
"""Modifiers that only K takes."""


@dataclass(frozen=True)
class Found:
    """Result of a search; divergences are means on the calibration text, nats per token."""

    budget: float
    """Bits per element that were allowed."""
    layers: list[str]
    """A scheme per layer."""
    bits_per_element: float
    kl_mean: float
    uniform: str | None
    """The best scheme that is the same in all layers, if one fits the budget."""
    uniform_kl_mean: float | None


class Search:
    """A search for one model, on passages other than those on which the result is judged. Raises InputError."""

    def __init__(
        self,
        factory: EngineFactory,
        passages: Sequence[Passage],
        budgets: Sequence[float],
        names: Sequence[str] | None = None,
        modifiers: str = "",
    ) -> None:
        """`budgets`: bits per element. `names`: the candidate formats, in addition to bf16; None: all.

        `modifiers`: of every scheme, such as +exact=2; those of K alone, such as +query, of every K that takes them.
        """
        mixed = ("kv_cache_dtype_layers", "kv_cache_dtype_skip_layers")
        self._subject = replace(factory, options={n: v for n, v in factory.options.items() if n not in mixed})
        self._passages = list(passages)
        self._budgets = list(dict.fromkeys(budgets))
        self._key_modifiers = "".join(_OF_KEYS.findall(modifiers))
        self._modifiers = _OF_KEYS.sub("", modifiers)
        info = factory.info()
        if info.rope_dim:
            raise InputError(f"{info.architecture} stores K and V as one latent: there are no sides to search apart")
        groups = self._subject.plan(_EXACT).groups
        self._cached = sorted(each for group in groups if group["visibility"] != _RECURRENT for each in group["layers"])
        """Layers with keys and values; others have a recurrent state, which no format changes."""
        self._layers = info.layers
        for name in names or (_EXACT,):
            if "," in name:
                raise InputError(f"the search chooses among formats of one side, such as int4; {name!r} is not one")
            _core.KvScheme.parse(name + modifiers)
        self._sides = [self._candidates(side, names) for side in _SIDES]
        for budget in self._budgets:  # refuses what cannot be
            allocate([choices for choices in self._sides for _ in self._cached], budget)

    def _scheme(self, k: str, v: str) -> str:
        return (k if k == v else f"k={k},v={v}") + ("" if k == v == _EXACT else self._modifiers)

    def _one_side(self, side: str, name: str) -> str:
        return self._scheme(name, _EXACT) if side == "k" else self._scheme(_EXACT, name)

    def _candidates(self, side: str, names: Sequence[str] | None) -> list[Choice]:
        """Formats that this side supports and that are smaller than bf16; their divergence is not measured yet."""
        choices = [Choice(_EXACT, 16.0, 0.0)]
        modified = (self._key_modifiers, "") if side == "k" and self._key_modifiers else ("",)
        for name in dict.fromkeys(names or formats.names()):
            for modifiers in modified:
                try:
                    bits = 2 * self._subject.plan(self._one_side(side, name + modifiers)).bits_per_element - 16
                except InputError:
                    continue
                if bits < 16:
                    choices.append(Choice(name + modifiers, bits, 0.0))
                break
        return choices

    def run(self) -> list[Found]:
        """Measures, and chooses for each budget, with a progress bar."""
        vocab = self._subject.info().vocab
        tokens = sum(len(passage.tokens) for passage in self._passages)
        identity = self._subject.identity(_EXACT)
        with progress_bar(tokens, f"search: {_EXACT}", " tokens") as bar:
            reference = make_reference(
                identity, vocab, self._passages, lambda: self._subject.reference_engine(_EXACT), bar.update
            )

        log = DivergenceLog(folder_of(reference.key), key_of(self._subject.options_identity()))

        def divergence(scheme: str, layers: str, progress: Progress) -> float:
            value = log.get(scheme, layers)
            if value is not None:
                progress(tokens)
                return value
            llm, _ = self._subject.engine(scheme, layers)
            value = float(np.concatenate([part.kl for part in reference.compare(llm, progress)]).mean())
            log.add(scheme, layers, value)
            return value

        uniform = [self._uniform(divergence, side, tokens) for side in _SIDES]
        items = self._sensitivities(divergence, uniform, tokens)
        schemes = [(budget, self._mixed(items, budget), self._best(uniform, budget)) for budget in self._budgets]
        count = sum(1 if best is None else 2 for _, _, best in schemes)
        with progress_bar(tokens * count, "search: the results", " tokens") as bar:
            return [self._compete(divergence, *each, bar.update) for each in schemes]

    def _uniform(self, divergence: _Divergence, side: str, tokens: int) -> list[Choice]:
        """The candidates of a side that are worth their bits when all layers have them."""
        choices = self._sides[_SIDES.index(side)]
        with progress_bar(tokens * (len(choices) - 1), f"search: all of {side}", " tokens") as bar:
            costs = [
                0.0 if choice.name == _EXACT else divergence(self._one_side(side, choice.name), "", bar.update)
                for choice in choices
            ]
        kept = undominated([replace(choice, cost=cost) for choice, cost in zip(choices, costs, strict=True)])
        return kept if kept[-1].name == _EXACT else [*kept, choices[0]]

    def _sensitivities(self, divergence: _Divergence, uniform: list[list[Choice]], tokens: int) -> list[list[Choice]]:
        """The choices of the K of every layer that has one, then of the V."""
        count = len(self._cached) * sum(len(choices) - 1 for choices in uniform)
        single = []
        with progress_bar(tokens * count, "search: layer by layer", " tokens") as bar:
            for side, choices in zip(_SIDES, uniform, strict=True):
                names = [choice.name for choice in choices if choice.name != _EXACT]
                rows = [
                    [divergence(_EXACT, f"{layer}={self._one_side(side, name)}", bar.update) for layer in self._cached]
                    for name in names
                ]
                single.append(np.array(rows).reshape(len(names), len(self._cached)))
        # uniform ends with bf16, which costs nothing
        totals = [np.array([choice.cost for choice in choices[:-1]]) for choices in uniform]
        items: list[list[Choice]] = []
        for choices, costs in zip(uniform, layer_divergences(single, totals), strict=True):
            every = np.vstack([costs, np.zeros(len(self._cached))])
            items += [
                [replace(choice, cost=float(cost)) for choice, cost in zip(choices, column, strict=True)]
                for column in every.T
            ]
        return items

    def _mixed(self, items: list[list[Choice]], budget: float) -> list[str]:
        """A scheme per layer."""
        chosen = allocate(items, budget)
        schemes = [_EXACT] * self._layers
        for layer, k, v in zip(self._cached, chosen[: len(self._cached)], chosen[len(self._cached) :], strict=True):
            schemes[layer] = self._scheme(k.name, v.name)
        return schemes

    def _best(self, uniform: list[list[Choice]], budget: float) -> str | None:
        """The uniform scheme of least cost."""
        same = sorted((k.cost + v.cost, self._scheme(k.name, v.name)) for k in uniform[0] for v in uniform[1])
        fits = (name for _, name in same if self._subject.plan(name).bits_per_element <= budget + 1e-9)
        return next(fits, None)

    def _compete(
        self, divergence: _Divergence, budget: float, mixed: list[str], best: str | None, progress: Progress
    ) -> Found:
        kl_mean = divergence(_EXACT, join_layers(mixed), progress)
        uniform_kl_mean = None if best is None else divergence(best, "", progress)
        if best is not None and uniform_kl_mean is not None and uniform_kl_mean <= kl_mean:
            mixed, kl_mean = [best] * self._layers, uniform_kl_mean
        bits = self._subject.plan(_EXACT, join_layers(mixed)).bits_per_element
        return Found(budget, mixed, bits, kl_mean, best, uniform_kl_mean)


_Divergence = Callable[[str, str, Progress], float]


def about(found: Found, model: str, passages: Sequence[Passage]) -> dict[str, Any]:
    """Metadata of a scheme file."""
    return {
        "model": model,
        "bits_per_element": found.bits_per_element,
        "kl_mean_on_calibration_text": found.kl_mean,
        "calibration_tokens": sum(len(passage.tokens) for passage in passages),
    }
