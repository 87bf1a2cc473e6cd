"""Facts of a model's files, and the problems that were found on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvanta import _core
from kvanta.errors import KvantaError


@dataclass(frozen=True)
class Fact:
    """`source`: the file, and the key in it."""

    name: str
    value: str
    source: str = ""


@dataclass
class ModelFacts:
    """Facts of a folder's files. A stage that fails leaves its problem, and the others go on."""

    info: _core.ModelInfo | None = None
    facts: list[Fact] = field(default_factory=list)
    ignored: list[Fact] = field(default_factory=list)
    """Files without effect, with the reason as the value."""
    problems: list[str] = field(default_factory=list)
    """Errors that loading, or a request, ends with."""
    loads: bool = True
    default_cache: str = "bf16"
    """The format of the cache without options."""

    def add(self, name: str, value: object, source: str = "") -> None:
        """A fact, unless it is None or an empty text."""
        if value is not None and str(value):
            self.facts.append(Fact(name, str(value), source))

    def attempt(self, stage: Callable[[], None]) -> None:
        """Runs a stage; its error becomes a problem, once."""
        try:
            stage()
        except KvantaError as error:
            self.loads = False
            if str(error) not in self.problems:
                self.problems.append(str(error))
