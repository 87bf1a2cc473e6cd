"""Task "needle": questions about a fact hidden in a long text, through the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvanta.errors import InputError
from kvanta.evaluate.passages import read_text
from kvanta.evaluate.reference import Progress
from kvanta.llm import LLM
from kvanta.params.sampling_params import SamplingParams
from kvanta.text.tokenizer import Tokenizer

_ANSWER_TOKENS = 24
_FACTS = (("London", "7413"), ("Paris", "2856"), ("Rome", "9047"), ("Madrid", "5162"))
_FACT = "The secret number of {city} is {number}."
_QUESTION = "What is the secret number of {city}? Answer with the number."


@dataclass(frozen=True)
class Needle:
    """A prompt, the depth of its fact (0: first, 1: last), and what the answer must contain."""

    depth: float
    token_ids: list[int]
    answer_text: str


def _prompt(tokenizer: Tokenizer, sentences: Sequence[str], depth: float, city: str, number: str) -> list[int]:
    place = round(depth * len(sentences))
    fact, question = _FACT.format(city=city, number=number), _QUESTION.format(city=city)
    text = " ".join([*sentences[:place], fact, *sentences[place:]])
    if tokenizer.chat_template is None:
        return tokenizer.encode(f"{text}\n\nQuestion: {question}\nAnswer: The secret number of {city} is")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": f"{text}\n\n{question}"}])
    return tokenizer.encode(chat, add_special_tokens=False)


def hide(tokenizer: Tokenizer, context: int, depths: Sequence[float], count: int) -> list[Needle]:
    """`count` facts at each depth, in prompts that with their answers fill `context` tokens. Raises InputError."""
    sentences = re.split(r"(?<=[.!?]) +", read_text(None).replace("\n", " "))
    lengths = [len(tokenizer.encode(" " + sentence, add_special_tokens=False)) for sentence in sentences]
    bare = max(len(_prompt(tokenizer, [], 0, *fact)) for fact in _FACTS)
    room = context - _ANSWER_TOKENS - bare
    if room < 0:
        raise InputError(
            f"a context of {context} tokens has no room for a needle; at least {context - room} are needed"
        )
    taken = 0
    while taken < len(lengths) and room >= lengths[taken]:
        room -= lengths[taken]
        taken += 1
    needles = []
    for depth in depths:
        if not 0 <= depth <= 1:
            raise InputError(f"a depth must be a share in 0..1, got {depth:g}")
        for city, number in _FACTS[:count]:
            filler = sentences[:taken]
            prompt = _prompt(tokenizer, filler, depth, city, number)
            while filler and len(prompt) > context - _ANSWER_TOKENS:  # tokens across the joints
                filler = filler[:-1]
                prompt = _prompt(tokenizer, filler, depth, city, number)
            needles.append(Needle(depth, prompt, number))
    return needles


class NeedleTask:
    """The share of the facts that are found, at each depth and in all."""

    def __init__(self, needles: list[Needle]) -> None:
        self._needles = needles

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(needle.token_ids) for needle in self._needles)

    def prepare(self, open_engine: Callable[[], LLM], progress: Progress) -> dict[str, Any]:
        """The reference's own shares: what a model does not find in the exact cache, no format can lose."""
        return self.measure(open_engine(), progress)

    def measure(self, llm: LLM, progress: Progress) -> dict[str, Any]:
        """needle: the share in all; needle_by_depth: one per depth."""
        params = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0)
        found: dict[float, list[bool]] = {}
        for needle in self._needles:
            (output,) = llm.generate({"prompt_token_ids": needle.token_ids}, params)
            found.setdefault(needle.depth, []).append(needle.answer_text in output.outputs[0].text)
            progress(len(needle.token_ids))
        every = [hit for hits in found.values() for hit in hits]
        return {
            "needle": sum(every) / len(every),
            "needle_by_depth": {f"{depth:g}": sum(hits) / len(hits) for depth, hits in found.items()},
        }
