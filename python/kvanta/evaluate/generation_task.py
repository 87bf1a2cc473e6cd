"""Task "generation": how long a format's greedy text stays the reference's, and how far it is from it on that path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvanta.evaluate import reference_store
from kvanta.evaluate.passages import Passage
from kvanta.evaluate.reference import Progress, Reference, key_of, save_reference
from kvanta.evaluate.row_metrics import RowMetrics
from kvanta.llm import LLM
from kvanta.params.sampling_params import SamplingParams
from kvanta.text.tokenizer import Tokenizer

_CHATS = (
    "Write a long story about a lighthouse keeper who finds a map in a bottle.",
    "Explain in detail how a steam engine works, part by part.",
    "Describe a week of holidays in the mountains, day by day.",
    "List twenty inventions that changed the world, and say in one sentence each why.",
)
_BEGINNINGS = ("Once upon a time", "One day, a little girl", "The sun was shining and", "There was a big dog")


def make_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of a few prompts: chats if the model has a template, beginnings of stories if it has none."""
    if tokenizer.chat_template is None:
        return [tokenizer.encode(text) for text in _BEGINNINGS]
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in _CHATS]
    return [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]


def agreement(reference: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that are equal before the first difference."""
    pairs = zip(reference, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(reference), len(other)))


class GenerationTask:
    """Greedy answers of up to `max_tokens` tokens to a few prompts."""

    def __init__(self, prompts: list[list[int]], max_tokens: int, identity: dict[str, Any], vocab: int) -> None:
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._vocab = vocab
        self._key = key_of({**identity, "generation": [prompts, max_tokens]})
        self._reference: Reference | None = None

    @property
    def tokens(self) -> int:
        """Written, and read again."""
        return sum(2 * self._max_tokens + len(prompt) for prompt in self._prompts)

    def _answers(self, llm: LLM, progress: Progress) -> list[list[int]]:
        params = SamplingParams(max_tokens=self._max_tokens, temperature=0.0)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in self._prompts], params, use_tqdm=False)
        progress(self._max_tokens * len(self._prompts))
        return [output.outputs[0].token_ids for output in outputs]

    def prepare(self, open_engine: Callable[[], LLM], progress: Progress) -> dict[str, Any]:
        """generation.tokens: the length of all of the reference's answers."""
        found = reference_store.load(self._key, None, self._vocab)
        if found is None:
            llm = open_engine()
            answers = self._answers(llm, progress)
            pairs = zip(self._prompts, answers, strict=True)
            passages = [Passage((*prompt, *answer), len(prompt) - 1) for prompt, answer in pairs]
            found = save_reference(self._key, self._vocab, passages, llm, progress)
        self._reference = Reference(*found, self._key)
        return {"generation": {"prompts": len(self._prompts), "tokens": len(self._reference.rows)}}

    def measure(self, llm: LLM, progress: Progress) -> dict[str, Any]:
        """Means over the prompts, and over all tokens of the reference's answers."""
        assert self._reference is not None, "prepare comes first"
        expected = [passage.targets for passage in self._reference.passages]
        equal = [agreement(*pair) for pair in zip(expected, self._answers(llm, progress), strict=True)]
        rows = RowMetrics.join(self._reference.compare(llm, progress))
        return {
            "generation": {
                "equal_tokens": equal,
                "equal_tokens_mean": sum(equal) / len(equal),
                "equal_share": sum(equal) / sum(map(len, expected)),
                "kl_mean": float(rows.kl.mean()),
                "kl_max": float(rows.kl.max()),
                "top1": float(rows.same_top.mean()),
            }
        }
