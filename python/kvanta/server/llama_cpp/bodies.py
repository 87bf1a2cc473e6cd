"""Bodies of llama.cpp's own endpoints, and the completions that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from kvanta.errors import InputError, about
from kvanta.params.checks import one_line
from kvanta.server.http.errors import ApiError
from kvanta.server.http.hints import Hint, note, note_fields
from kvanta.server.requests.fill_in import fill_prompt, fill_tokens
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
SAME = (
    *("frequency_penalty", "ignore_eos", "min_p", "presence_penalty", "seed", "stop", "stream", "temperature", "top_k"),
    *("top_p", "n", "cache_salt", "priority", "structured_outputs"),
)
_NAMES = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_CACHE = Hint("the prefix cache finds what earlier requests have computed", "0.2.0")
_SLOT = Hint("requests have no slots of their own", "0.2.0")
_ALWAYS = Hint("the answer is the same without it", "0.2.0")
IGNORED: Mapping[str, Hint] = {
    **dict.fromkeys(("cache_prompt", "n_cache_reuse"), _CACHE),
    **dict.fromkeys(("id_slot", "slot_id"), _SLOT),
    **dict.fromkeys(("return_progress", "t_max_prompt_ms", "timings_per_token"), _ALWAYS),
    "n_keep": Hint("prompts are not shifted: one that is too long is refused", "0.2.0"),
    "repeat_last_n": Hint("the penalty counts the whole text", "0.2.0"),
    "samplers": Hint("penalties, temperature, top_k, top_p and min_p apply in this order", "0.2.0"),
}
_OTHER_SAMPLERS = "give temperature, top_k, top_p or min_p"
REFUSED: Mapping[str, Refused] = {
    "dry_multiplier": Refused(_OTHER_SAMPLERS, (0, 0.0)),
    "dynatemp_range": Refused(_OTHER_SAMPLERS, (0, 0.0)),
    "image_data": Refused("models read text alone", ([],)),
    "lora": Refused("LoRA adapters are not supported; merge them into the weights", ([],)),
    "min_keep": Refused("it is 1: a sampler always keeps the most likely token", (0, 1)),
    "mirostat": Refused(_OTHER_SAMPLERS, (0,)),
    "n_indent": Refused("give stop", (0,)),
    "post_sampling_probs": Refused("probabilities are the model's, before any sampler", (False,)),
    "t_max_predict_ms": Refused("give n_predict, or close the connection", (0, -1)),
    "top_n_sigma": Refused(_OTHER_SAMPLERS, (-1, -1.0, 0, 0.0)),
    "typical_p": Refused(_OTHER_SAMPLERS, (1, 1.0)),
    "xtc_probability": Refused(_OTHER_SAMPLERS, (0, 0.0)),
}
READ = ("grammar", "json_schema", "logit_bias")
# Editors send these with every request to fill in, and cut the text by themselves.
EDITORS_IGNORED: Mapping[str, Hint] = {
    "n_indent": Hint("the client cuts the text", "0.2.0"),
    "t_max_predict_ms": Hint("n_predict limits the text", "0.2.0"),
}


class LlamaCompletion(Body):
    """POST /completion."""

    prompt: Any = None
    n_predict: int | None = None
    n_probs: int | None = None
    return_tokens: bool | None = None
    stream: bool | None = None
    response_fields: Annotated[Any, WithJsonSchema(_NAMES)] = None
    hints: ClassVar[Mapping[str, Hint]] = {}
    """Fields that are hints at this endpoint, and refused at others."""

    @property
    def answer_fields(self) -> list[str]:
        """Paths of the answer's fields that the client wants; empty: all. Raises InputError."""
        given = self.response_fields
        if not isinstance(given, list | None) or not all(isinstance(path, str) for path in given or ()):
            raise InputError(f"response_fields must be a list of texts, got {one_line(given)}", "response_fields")
        return given or []

    def completion(self, prompt: Any) -> CompletionRequest:
        """The request for the text that follows `prompt`. Raises InputError or ApiError."""
        _ = self.answer_fields
        extra = dict(self.model_extra or {})
        note_fields(extra, self.hints)
        for name in self.hints:
            extra.pop(name, None)
        check_refused(extra, REFUSED)
        fields: dict[str, Any] = {"prompt": prompt, "stream": self.stream}
        if self.n_predict is not None and self.n_predict >= 0:
            fields["max_tokens"] = max(1, self.n_predict)  # the engine always makes one token
        if self.n_probs:
            fields["logprobs"] = self.n_probs
        for name, value in extra.items():
            if name in NAMES or name in SAME:
                fields[NAMES.get(name, name)] = value
            elif value is not None and name not in REFUSED and name not in READ:
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

    hints: ClassVar[Mapping[str, Hint]] = EDITORS_IGNORED

    def filled(self, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
        """Token ids of the prompt that asks for what stands between prefix and suffix. Raises ApiError."""
        tokens = fill_tokens(tokenizer)
        if tokens is None:
            raise ApiError(501, "this model has no tokens for filling in the middle: use /completion")
        before = (_text("input_prefix", self.input_prefix), _text("prompt", self.prompt))
        room = max_model_len - max(1, self.n_predict or 1)
        return fill_prompt(tokenizer, tokens, before, _text("input_suffix", self.input_suffix), self._files(), room)

    def _files(self) -> list[tuple[str, str]]:
        """Names and texts of other files."""
        given = self.input_extra or []
        if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
            message = f"input_extra must be a list of {{'filename', 'text'}}, got {one_line(given)}"
            raise InputError(message, "input_extra")
        return [(_text("filename", each.get("filename") or "tmp"), _text("text", each.get("text"))) for each in given]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str | None):
        raise InputError(f"{name} must be a text, got {one_line(value)}", name)
    return value or ""


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
        if given.get("multimodal_data"):
            raise InputError("prompt has multimodal_data, which is not supported: models read text alone", "prompt")
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
