"""Tokens that end a text: those of config.json, generation_config.json and the tokenizer together, as in vLLM.

Checkpoints of fine-tunes often have the base model's token in the first two, and the chat's own in the tokenizer alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvanta.files.json_file import text_config
from kvanta.text.tokenizer import Tokenizer
from kvanta.text.tokenizer_files.files import read_json

_KEY = "eos_token_id"


def tokenizer_ends(tokenizer: Tokenizer) -> list[int]:
    """The tokenizer's part, for EngineConfig.eos_token_ids; the engine reads the others."""
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]


@dataclass(frozen=True)
class EndTokens:
    """Ids in the order of their places, and the files that have each."""

    sources: Mapping[int, tuple[str, ...]]
    vocab: int
    """Rows of the model; ids beyond are never sampled."""

    @classmethod
    def read(cls, folder: Path, tokenizer: Tokenizer, defaults: Iterable[int], vocab: int) -> EndTokens:
        """`defaults`: the engine's, which a class may have where the files have none."""
        config = read_json(folder / "config.json")
        own = config.get(_KEY, text_config(config).get(_KEY))
        places = {
            "config.json": _ids(own),
            "generation_config.json": _ids(read_json(folder / "generation_config.json").get(_KEY)),
            tokenizer.place_of("eos_token") or tokenizer.path.name: tokenizer_ends(tokenizer),
        }
        found: dict[int, tuple[str, ...]] = {}
        for place, tokens in places.items():
            for token in tokens:
                found[token] = (*found.get(token, ()), place)
        for token in defaults:
            found.setdefault(token, ("the class's default",))
        return cls(found, vocab)

    @property
    def tokens(self) -> list[int]:
        """Ids that can be sampled."""
        return [token for token in self.sources if 0 <= token < self.vocab]

    def places(self, tokens: Iterable[int]) -> str:
        """The files that have one of these."""
        return ", ".join(dict.fromkeys(place for token in tokens for place in self.sources[token]))


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, int) and not isinstance(each, bool)]
