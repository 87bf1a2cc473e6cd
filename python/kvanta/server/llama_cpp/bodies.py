"""Bodies of llama.cpp's own endpoints, and the completions that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvanta.errors import InputError, about
from kvanta.params.checks import one_line
from kvanta.server.http.errors import ApiError
from kvanta.server.http.hints import Hint, note
from kvanta.server.requests.protocol import Body, CompletionRequest
from kvanta.server.requests.request_fields import Refused, check_refused
from kvanta.server.requests.translated import as_completion
from kvanta.text.tokenizer import Tokenizer

NAMES: Mapping[str, str] = {
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "repeat_penalty": "repetition_penalty",
}
"""Fields of llama.cpp -> those of completions, where these differ."""
_SAME = (
    *("frequency_penalty", "ignore_eos", "min_p", "presence_penalty", "seed", "stop", "stream", "temperature", "top_k"),
    *("top_p", "n", "cache_salt", "priority", "structured_outputs"),
)
_CACHE = Hint("the prefix cache finds what earlier requests have computed", "0.2.0")
_SLOT = Hint("requests have no slots of their own", "0.2.0")
_ALWAYS = Hint("the answer is the same without it", "0.2.0")
IGNORED: Mapping[str, Hint] = {
    **dict.fromkeys(("cache_prompt", "n_cache_reuse"), _CACHE),
    **dict.fromkeys(("id_slot", "slot_id"), _SLOT),
    **dict.fromkeys(("min_keep", "n_indent", "response_fields", "t_max_predict_ms", "timings_per_token"), _ALWAYS),
    "image_data": Hint("models read text alone", "0.2.0"),
    "n_keep": Hint("prompts are not shifted: one that is too long is refused", "0.2.0"),
    "repeat_last_n": Hint("the penalty counts the whole text", "0.2.0"),
    "samplers": Hint("penalties, temperature, top_k, top_p and min_p apply in this order", "0.2.0"),
}
_OTHER_SAMPLERS = "give temperature, top_k, top_p or min_p"
REFUSED: Mapping[str, Refused] = {
    "dry_multiplier": Refused(_OTHER_SAMPLERS, (0, 0.0)),
    "dynatemp_range": Refused(_OTHER_SAMPLERS, (0, 0.0)),
    "lora": Refused("LoRA adapters are not supported; merge them into the weights", ([],)),
    "mirostat": Refused(_OTHER_SAMPLERS, (0,)),
    "top_n_sigma": Refused(_OTHER_SAMPLERS, (-1, -1.0, 0, 0.0)),
    "typical_p": Refused(_OTHER_SAMPLERS, (1, 1.0)),
    "xtc_probability": Refused(_OTHER_SAMPLERS, (0, 0.0)),
}
_READ = ("grammar", "json_schema", "logit_bias", "post_sampling_probs", "return_tokens", "return_progress")
# Names of the tokens for filling in the middle: prefix, suffix, middle.
_FILL_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
)


class LlamaCompletion(Body):
    """POST /completion."""

    prompt: Any = None
    n_predict: int | None = None
    n_probs: int | None = None
    return_tokens: bool | None = None
    stream: bool | None = None

    def completion(self, prompt: Any) -> CompletionRequest:
        """The request for the text that follows `prompt`. Raises InputError or ApiError."""
        extra = dict(self.model_extra or {})
        check_refused(extra, REFUSED)
        fields: dict[str, Any] = {"prompt": prompt, "stream": self.stream}
        if self.n_predict is not None and self.n_predict >= 0:
            fields["max_tokens"] = self.n_predict
        if self.n_probs:
            fields["logprobs"] = self.n_probs
        for name, value in extra.items():
            if name in NAMES or name in _SAME:
                fields[NAMES.get(name, name)] = value
            elif value is not None and name not in REFUSED and name not in _READ:
                hint = IGNORED.get(name)
                note(name, "the field is unknown" if hint is None else hint.reason)
        if isinstance(fields.get("seed"), int) and fields["seed"] < 0:
            del fields["seed"]
        if fields.get("stop") == []:
            del fields["stop"]
        if extra.get("logit_bias"):
            fields["logit_bias"] = _bias(extra["logit_bias"])
        grammar, schema = extra.get("grammar"), extra.get("json_schema")
        if grammar and schema:
            raise ApiError(400, "grammar and json_schema exclude each other", param="grammar")
        if grammar:
            fields["structured_outputs"] = {"grammar": grammar}
        elif schema:
            fields["structured_outputs"] = {"json": schema}
        return as_completion(fields)

    def prompts(self, tokenizer: Tokenizer) -> list[Any]:
        """Texts and lists of token ids. Raises InputError."""
        given = self.prompt
        if isinstance(given, list) and given and not _is_mixed(given):
            return [_tokens(each, tokenizer) for each in given]
        return [_tokens(given, tokenizer)]


class LlamaInfill(LlamaCompletion):
    """POST /infill."""

    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: Any = None

    def filled(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the prompt that asks for what stands between prefix and suffix. Raises ApiError."""
        for names in _FILL_TOKENS:
            marks = [tokenizer.token_id(name) for name in names]
            if all(mark is not None for mark in marks):
                break
        else:
            raise ApiError(501, "this model has no tokens for filling in the middle: use /completion")
        if self.input_extra:
            note("input_extra", "other files are not read; put them into input_prefix")

        def ids(text: Any) -> list[int]:
            if not isinstance(text, str | None):
                raise InputError(f"prompt must be a text, got {one_line(text)}", "prompt")
            return tokenizer.encode(text or "", add_special_tokens=False)

        prefix, suffix, middle = (int(mark or 0) for mark in marks)
        before = [prefix, *ids(self.input_prefix), *ids(self.prompt)]
        return [*before, suffix, *ids(self.input_suffix), middle]


class LlamaContent(Body):
    """POST /embedding."""

    content: Any = None
    input: Any = None


def _is_mixed(given: list[Any]) -> bool:
    """One prompt of token ids, and perhaps texts; lists within are prompts of their own, and so are texts alone."""
    return any(isinstance(each, int) for each in given)


def _tokens(given: Any, tokenizer: Tokenizer) -> Any:
    """A text, or token ids; texts between token ids are made such."""
    if isinstance(given, Mapping):
        given = given.get("prompt_string")
    if not isinstance(given, str | list):
        raise InputError(f"prompt must be texts, token ids or lists of them, got {one_line(given)}", "prompt")
    if isinstance(given, list) and any(isinstance(each, str) for each in given):
        with about("prompt"):
            parts = [tokenizer.encode(each, add_special_tokens=not at) if isinstance(each, str) else [each]
                     for at, each in enumerate(given)]  # fmt: skip
        return [token for part in parts for token in part]
    return given


def _bias(given: Any) -> Any:
    """From pairs of a token id and a number, of which false bans the token."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise InputError(f"logit_bias must be pairs of a token id and a number, got {one_line(given)}", "logit_bias")
    return {str(token): -100 if value is False else value for token, value in pairs}
