"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvanta.outputs import Logprob, TokenLogprobs
from kvanta.text.detokenize import Detokenizer
from kvanta.text.tokenizer import Tokenizer

_MIN_LOGPROB = -9999.0  # JSON has no minus infinity


class LogprobsWriter:
    """Writes positions of one text. `as_ids`: tokens are called "token_id:17", which is never ambiguous.

    `most_likely`: number of tokens at each position; None: all that the engine returned, for logprob_token_ids.
    """

    def __init__(self, tokenizer: Tokenizer, most_likely: int | None, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._most_likely = most_likely
        self._as_ids = as_ids

    def completions(
        self, tokens: Sequence[int], entries: Iterable[TokenLogprobs | None], offsets: list[int]
    ) -> dict[str, Any]:
        """Log-probabilities for /v1/completions; none for the first prompt token. `offsets`: those of TextOffsets."""
        result: dict[str, list[Any]] = {"text_offset": offsets, "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, entry in zip(tokens, entries, strict=True):
            result["tokens"].append(self._name(token))
            result["token_logprobs"].append(finite(entry[token].logprob) if entry else None)
            result["top_logprobs"].append(self._by_name(token, entry) if entry else None)
        return result

    def chat(self, tokens: Sequence[int], entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Log-probabilities for /v1/chat/completions."""
        content = []
        for token, entry in zip(tokens, entries, strict=True):
            top = [self._chat_token(other, logprob) for other, logprob in self._top(entry)]
            content.append({**self._chat_token(token, entry[token]), "top_logprobs": top})
        return {"content": content}

    def _by_name(self, token: int, entry: TokenLogprobs) -> dict[str, float]:
        """The text's own token and the most likely ones. Among tokens with equal text, the most likely."""
        named: dict[str, float] = {}
        for other, logprob in (*self._top(entry), (token, entry[token])):
            named.setdefault(self._name(other), finite(logprob.logprob))
        return named

    def _top(self, entry: TokenLogprobs) -> list[tuple[int, Logprob]]:
        most = self._most_likely
        return [(token, logprob) for token, logprob in entry.items() if most is None or logprob.rank <= most]

    def _chat_token(self, token: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": self._name(token),
            "logprob": finite(logprob.logprob),
            "bytes": list(self._tokenizer.bytes[token]),
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)


class TextOffsets:
    """Positions in a text, in characters, at which its tokens begin; tokens without text have that of the next one."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        """`skip_special_tokens`: of the answer."""
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._answer: Detokenizer | None = None
        self._end = 0

    def of_prompt(self, tokens: Sequence[int], echoed: str, given: str | None) -> list[int]:
        """Offsets of a prompt that precedes the answer as `echoed`. `given`: its text, if the client has sent it."""
        detokenizer = self._tokenizer.detokenizer((), skip_special_tokens=given is None)
        added = 0 if given is None else self._added(tokens, given)
        offsets = [0] * added + self._offsets(tokens[added:], detokenizer)
        self._end = len(echoed)
        return offsets

    def of_answer(self, tokens: Sequence[int], prompt: Sequence[int]) -> list[int]:
        """Offsets of the tokens that follow the prompt and earlier ones."""
        if self._answer is None:
            self._answer = self._tokenizer.detokenizer(prompt, skip_special_tokens=self._skips)
        return self._offsets(tokens, self._answer)

    def _added(self, tokens: Sequence[int], text: str) -> int:
        """Tokens before the text's own: a beginning-of-sequence token, unless the text begins with it."""
        bos = self._tokenizer.bos_id
        if bos is None or tokens[0] != bos:
            return 0
        own = text.startswith(self._tokenizer.special_texts["bos_token"])
        return int(not own or list(tokens[:2]) == [bos, bos])

    def _offsets(self, tokens: Sequence[int], detokenizer: Detokenizer) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self._end)
            self._end += len(detokenizer.add([token]))
        return offsets


def prompt_logprobs(entries: Iterable[TokenLogprobs | None] | None) -> list[Any] | None:
    """Value of `prompt_logprobs`, as vLLM answers it."""
    if entries is None:
        return None
    return [
        {
            str(token): {"logprob": finite(each.logprob), "rank": each.rank, "decoded_token": each.decoded_token}
            for token, each in entry.items()
        }
        if entry
        else None
        for entry in entries
    ]


def finite(logprob: float) -> float:
    """The log-probability as a finite number, for JSON."""
    return max(_MIN_LOGPROB, logprob)
