"""An evaluation: the reference once, then one format after another, each by every task."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvanta.errors import InputError
from kvanta.evaluate.divergence_task import DivergenceTask
from kvanta.evaluate.engine_factory import EngineFactory
from kvanta.evaluate.generation_task import GenerationTask, make_prompts
from kvanta.evaluate.needle_task import NeedleTask, hide
from kvanta.evaluate.passages import SHIPPED_TEXT, Passage, beginning_of, read_text, tokenize, windows
from kvanta.evaluate.reference import Progress
from kvanta.evaluate.summary import bootstrap_unit
from kvanta.evaluate.task import Task
from kvanta.llm import LLM
from kvanta.options.engine import by_name
from kvanta.params.checks import whole_number
from kvanta.terminal.progress import progress_bar

_SEARCH_WINDOW = 1024  # tokens
TASKS = ("kl", "needle", "generation")


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation: the arguments of `kvanta eval`."""

    formats: Sequence[str] | None = None
    """Names, schemes or scheme files; None: all quantized formats that the model takes."""
    recommended: bool = False
    """Evaluates the recommended formats only."""
    text: str | None = None
    """A file; None: the shipped text."""
    context: int | None = None
    """Tokens of a window; None: 2048 or the model's limit."""
    tokens: int = 16384
    """Tokens of the text, over all windows."""
    levels: Sequence[float] = ()
    """Shares of a window's pages, the oldest ones, that are demoted to the cache's floor before the rows that count,
    0..1: a row of figures for each. Empty: none is."""
    reference: str = "bf16"
    reference_weights: str | None = None
    """weight_dtype of the reference; None: that of `engine`."""
    tasks: Sequence[str] = ("kl",)
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Positions of the needles, 0..1; 0: at the beginning."""
    needles: int = 2
    """Facts per depth, 1..4."""
    generation_tokens: int = 256
    """At most, per prompt."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further engine options, by the names of LLM's arguments."""


class Evaluation:
    """Checks everything first, so that no wrong name ends a long run. Raises InputError or ResourceError."""

    def __init__(self, model: str, settings: Settings) -> None:
        self.settings = settings
        for task in settings.tasks:
            if task not in TASKS:
                raise InputError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
        whole_number("tokens", settings.tokens, 1, 2**40)
        whole_number("needles", settings.needles, 1, 4)
        whole_number("generation_tokens", settings.generation_tokens, 1, 2**20)
        if settings.levels and set(settings.tasks) != {"kl"}:
            raise InputError("levels are of the task kl alone")
        for share in settings.levels:
            if not 0 <= share <= 1:
                raise InputError(f"levels must be from 0 to 1 (0 to 100 %), got {share}")
        sequences = 4 if "generation" in settings.tasks else 1
        weights = settings.reference_weights
        if weights is not None:
            by_name()["weight_dtype"].read(weights)
        self.factory = EngineFactory.find(model, settings.context, sequences, settings.engine, weights)
        self.factory.of_reference().plan(settings.reference)
        self.formats = self.factory.usable_formats(settings.formats, recommended=settings.recommended)
        for name in self.formats if settings.levels else []:
            if not self.factory.plan(name).floor_bytes_per_token:
                raise InputError(
                    f"levels need a floor below {name}: give --kv-cache-dtype and --kv-cache-floor, or a format like "
                    "0=int8,floor=t3"
                )
        self.text_sha256: str | None = None
        self.text_tokens = 0
        """Tokens of the text that are read, before it is divided into windows; 0: no task reads it."""
        self.passages = self._passages() if "kl" in settings.tasks else []
        self.rows: dict[str, dict[str, Any]] = {}
        self.reference: dict[str, Any] = {}
        self._tasks = [self._task(name) for name in dict.fromkeys(settings.tasks)]

    def _passages(self) -> list[Passage]:
        tokenizer = self.factory.tokenizer()
        text = read_text(self.settings.text)
        self.text_sha256 = hashlib.sha256(text.encode()).hexdigest()
        tokens = tokenize(text, tokenizer, self.settings.tokens)
        self.text_tokens = len(tokens)
        return windows(tokens, beginning_of(tokenizer), self.factory.context)

    def _task(self, name: str) -> Task:
        factory, settings = self.factory, self.settings
        if name == "needle":
            return NeedleTask(hide(factory.tokenizer(), factory.context, settings.depths, settings.needles))
        identity = factory.identity(settings.reference)
        vocab = factory.info().vocab
        if name == "kl":
            return DivergenceTask(self.passages, identity, vocab)
        prompts = make_prompts(factory.tokenizer())
        longest = max(map(len, prompts))
        if longest >= factory.context:
            raise InputError(f"a context of {factory.context} tokens has no room for answers to {longest} tokens")
        return GenerationTask(prompts, min(settings.generation_tokens, factory.context - longest), identity, vocab)

    def calibration_passages(self, tokens: int) -> list[Passage]:
        """Windows of `tokens` tokens that no task scores: what follows in the text, or else the shipped text."""
        tokenizer = self.factory.tokenizer()
        rest = tokenize(read_text(self.settings.text), tokenizer, self.settings.tokens + tokens)[self.settings.tokens :]
        if len(rest) < tokens and self.settings.text is not None:
            rest = tokenize(read_text(None), tokenizer, tokens)
        if len(rest) < tokens:
            raise InputError(f"the text has {len(rest)} tokens left for the search, which wants {tokens}")
        return windows(rest, beginning_of(tokenizer), min(self.factory.context, tokens, _SEARCH_WINDOW))

    def run(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each format's name and figures, as soon as it is done; `rows` keeps them. After prepare."""
        tokens = sum(task.tokens for task in self._tasks)
        names = self.names()
        with progress_bar(tokens * len(names), "", " tokens") as bar:
            for index, (name, (scheme, demoted)) in enumerate(names.items()):
                bar.set_description(f"{name} ({index + 1} of {len(names)})")
                self.rows[name] = self._measure(scheme, demoted, bar.update)
                bar.n = tokens * (index + 1)  # a task may count fewer
                bar.clear()  # for the line that the caller prints
                yield name, self.rows[name]

    def names(self) -> dict[str, tuple[str, float]]:
        """Names of the rows: of each the format, and the share of its pages at the floor."""
        if not self.settings.levels:
            return {name: (name, 0.0) for name in self.formats}
        return {
            f"{name}, {share:.0%} at the floor": (name, share)
            for name in self.formats
            for share in self.settings.levels
        }

    def _measure(self, name: str, demoted: float, progress: Progress) -> dict[str, Any]:
        llm, notes = self.factory.engine(name)
        plan = self.factory.plan(name)
        size = plan.bytes_per_token
        if demoted:
            size += demoted * (plan.floor_bytes_per_token - size)
        row: dict[str, Any] = {
            "bits_per_element": plan.bits_per_element * size / plan.bytes_per_token,
            "bytes_per_token": size,
        }
        for task in self._tasks:
            row |= (
                task.measure(llm, progress, demoted)
                if isinstance(task, DivergenceTask)
                else task.measure(llm, progress)
            )
        return {**row, "saturated": llm.stats()["saturated"], "notes": notes}

    def prepare(self) -> None:
        """The reference: `reference` has its figures."""
        engines: list[LLM] = []

        def open_engine() -> LLM:
            if not engines:
                engines.append(self.factory.reference_engine(self.settings.reference))
            return engines[0]

        with progress_bar(sum(task.tokens for task in self._tasks), self.settings.reference, " tokens") as bar:
            for task in self._tasks:
                self.reference |= task.prepare(open_engine, bar.update)

    def _text_name(self) -> str:
        return SHIPPED_TEXT.name if self.settings.text is None else self.settings.text

    def report(self) -> dict[str, Any]:
        """The JSON report of the formats evaluated so far."""
        from kvanta import __version__

        result: dict[str, Any] = {
            "model": self.factory.model,
            "text": self._text_name() if self.passages else None,
            "text_sha256": self.text_sha256,
            "context": self.factory.context,
            "tokens": sum(len(passage.tokens) for passage in self.passages),
            "scored_tokens": sum(passage.rows for passage in self.passages),
            "windows": len(self.passages),
            "ci95_over": bootstrap_unit(len(self.passages)) if self.passages else None,
            "model_limit": int(self.factory.info().max_position),
            "weight_dtype": self.settings.engine.get("weight_dtype") or "auto",
            "reference": self.settings.reference,
            "reference_weights": self.settings.reference_weights,
            "reference_ppl": self.reference.get("ppl"),
            "reference_figures": self.reference,
            "version": __version__,
            "formats": self.rows,
        }
        return result


def evaluate(model: str, settings: Settings | None = None) -> dict[str, Any]:
    """The report of `kvanta eval`, all formats done. Raises InputError or ResourceError."""
    evaluation = Evaluation(model, settings or Settings())
    evaluation.prepare()
    for _ in evaluation.run():
        pass
    return evaluation.report()
