"""How tokens are chosen and when a text ends: the arguments of vLLM's SamplingParams, with its defaults."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvanta.errors import InputError
from kvanta.structured_output import StructuredOutputsParams
from kvanta.values import one_line, real_number, truth, whole_number


@dataclass(kw_only=True)
class SamplingParams:
    """Raises InputError, naming the field and its range, when a value is out of range."""

    n: int = 1
    """Texts per prompt; with a seed, text i uses seed + i."""
    max_tokens: int | None = 16
    """None: as many as the context holds."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is taken before; stop strings are looked for after."""
    temperature: float = 1.0
    """0: always the most likely token."""
    top_k: int = 0
    """0 or -1: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """The same seed and prompt give the same tokens, whatever else is in the batch."""
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    """The log-probabilities of the chosen token and of that many most likely ones, for every new token."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the text must have: JSON, a regular expression, a choice, a grammar."""

    def __post_init__(self) -> None:
        """Checks types and ranges; numpy's numbers become Python's."""
        self._whole("n", 1, 1024)
        self._whole("max_tokens", 1, 2**31 - 1, optional=True)
        self._whole("min_tokens", 0, 2**31 - 1)
        self._whole("top_k", -1, 2**31 - 1)
        self._whole("logprobs", 0, 2**31 - 1, optional=True)
        self._whole("prompt_logprobs", 0, 2**31 - 1, optional=True)
        self._whole("seed", 0, 2**64 - 1, optional=True)
        self._number("temperature", 0.0, math.inf)
        self._number("top_p", 0.0, 1.0, open_below=True)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.0, math.inf, open_below=True)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            setattr(self, name, truth(name, getattr(self, name)))
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, type(None))):
            raise InputError(
                f"structured_outputs is {one_line(self.structured_outputs)}, not StructuredOutputsParams or None"
            )
        self._read_stops()
        self._read_bias()

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def _read_stops(self) -> None:
        stops = self.stop
        if stops is not None and not isinstance(stops, str):
            self.stop = list(stops) if isinstance(stops, Iterable) else [""]
        if not all(isinstance(stop, str) and stop for stop in self.stop_strings):
            raise InputError(f"stop is {one_line(stops)}, not a text or a list of texts that are not empty")
        tokens = self.stop_token_ids
        if tokens is None:
            return
        if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Iterable):
            raise InputError(f"stop_token_ids is {one_line(tokens)}, not a list of token ids or None")
        self.stop_token_ids = [whole_number("a token of stop_token_ids", token, 0, 2**31 - 1) for token in tokens]

    def _read_bias(self) -> None:
        bias = self.logit_bias
        if bias is None:
            return
        if not isinstance(bias, Mapping):
            raise InputError(f"logit_bias is {one_line(bias)}, not a mapping of token ids to numbers or None")
        self.logit_bias = {
            whole_number("a token of logit_bias", token, 0, 2**31 - 1): real_number(
                f"logit_bias of token {token}", value, -_FLOAT32_MAX, _FLOAT32_MAX
            )
            for token, value in bias.items()
        }

    def _whole(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is not None or not optional:
            setattr(self, name, whole_number(name, value, low, high, " or None" if optional else ""))

    def _number(self, name: str, low: float, high: float, *, open_below: bool = False) -> None:
        setattr(self, name, real_number(name, getattr(self, name), low, high, open_below=open_below))


_FLOAT32_MAX = 3.4e38
