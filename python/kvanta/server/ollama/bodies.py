"""Bodies of Ollama's API, and the chats and completions that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvanta.errors import InputError
from kvanta.params.checks import one_line
from kvanta.server.http.errors import ApiError
from kvanta.server.http.hints import Hint, note
from kvanta.server.requests.fill_in import fill_prompt, fill_tokens
from kvanta.server.requests.protocol import Body, ChatRequest, CompletionRequest
from kvanta.server.requests.request_fields import Refused, check_refused
from kvanta.server.requests.translated import as_chat, as_completion, further_fields
from kvanta.text.tokenizer import Tokenizer

OPTION_NAMES: Mapping[str, str] = {
    "frequency_penalty": "frequency_penalty",
    "min_p": "min_p",
    "num_predict": "max_tokens",
    "presence_penalty": "presence_penalty",
    "repeat_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""Keys of `options` -> fields of chats."""
_LOADED = Hint("the model is loaded when the server starts", "0.2.0")
OPTIONS_IGNORED: Mapping[str, Hint] = {
    **dict.fromkeys(("low_vram", "main_gpu", "num_batch", "num_gpu", "num_thread", "numa"), _LOADED),
    **dict.fromkeys(("use_mlock", "use_mmap"), _LOADED),
    "num_ctx": Hint("the context is the server's (--max-model-len)", "0.2.0"),
    "num_keep": Hint("prompts are not shifted: one that is too long is refused", "0.2.0"),
    "penalize_newline": Hint("the penalty counts every token", "0.2.0"),
    "repeat_last_n": Hint("the penalty counts the whole text", "0.2.0"),
}
OPTIONS_REFUSED: Mapping[str, Refused] = {
    "mirostat": Refused("give temperature, top_k, top_p or min_p", (0,)),
    "tfs_z": Refused("give top_p or min_p", (1, 1.0)),
    "typical_p": Refused("give top_p or min_p", (1, 1.0)),
}
IGNORED: Mapping[str, Hint] = {
    "keep_alive": Hint("the model stays in memory; with --models it is honoured", "0.2.0"),
}
REFUSED: Mapping[str, Refused] = {
    "context": Refused("send the conversation to /api/chat", ([],)),
    "template": Refused("the server's own is used (--chat-template)", ("",)),
}
FIELD_NAMES: Mapping[str, str] = {
    **{ours: f"options.{theirs}" for theirs, ours in OPTION_NAMES.items()},
    "prompt": "messages",
    "reasoning_effort": "think",
    "response_format": "format",
}
"""A chat's fields -> Ollama's."""


class OllamaBody(Body):
    """Fields of /api/chat and /api/generate; further ones are those of chats. Streams are the default."""

    options: dict[str, Any] | None = None
    format: Any = None
    stream: bool | None = None
    think: bool | str | None = None
    keep_alive: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def _fields(self) -> dict[str, Any]:
        """Fields of a chat or a completion. Raises InputError or ApiError."""
        check_refused(self.model_extra or {}, REFUSED)
        further = further_fields(self, REFUSED, IGNORED)
        if self.keep_alive is not None:
            note("keep_alive", IGNORED["keep_alive"].reason)
        options = self.options or {}
        check_refused(options, OPTIONS_REFUSED, "options.")
        fields: dict[str, Any] = {**further, "model": self.model, "stream": self.stream is not False}
        for name, value in options.items():
            if name in OPTION_NAMES:
                fields[OPTION_NAMES[name]] = value
            elif name not in OPTIONS_REFUSED and value is not None:
                hint = OPTIONS_IGNORED.get(name)
                note(f"options.{name}", "the option is unknown" if hint is None else hint.reason)
        if isinstance(fields.get("max_tokens"), int) and fields["max_tokens"] < 0:  # as many as there is room for
            del fields["max_tokens"]
        if isinstance(fields.get("seed"), int) and fields["seed"] < 0:
            del fields["seed"]
        if isinstance(fields.get("stop"), list) and not fields["stop"]:
            del fields["stop"]
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, Mapping):
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "format", "schema": self.format},
            }
        elif self.format not in (None, ""):
            raise InputError(f"format must be 'json' or a JSON schema, got {one_line(self.format)}", "format")
        return fields

    def _chat_fields(self) -> dict[str, Any]:
        """Fields of a chat alone: its log-probabilities, and what turns reasoning on and off."""
        fields = {"logprobs": True, "top_logprobs": self.top_logprobs} if self.logprobs else {}
        return {**fields, **self._thinking()}

    def _thinking(self) -> dict[str, Any]:
        if isinstance(self.think, str) and self.think.lower() in ("true", "false"):
            return {"enable_thinking": self.think.lower() == "true"}
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think, "enable_thinking": True}
        return {} if self.think is None else {"enable_thinking": self.think}


class OllamaChat(OllamaBody):
    """POST /api/chat."""

    messages: Any = None
    tools: Any = None

    @property
    def loads(self) -> bool:
        """Without messages a client only wants the model in memory."""
        return not self.messages

    def chat(self) -> ChatRequest:
        """Raises InputError or ApiError."""
        if not isinstance(self.messages, list) or not all(isinstance(each, Mapping) for each in self.messages):
            raise InputError(f"messages must be a list of objects, got {one_line(self.messages)}", "messages")
        last = self.messages[-1]
        continues = last.get("role") == "assistant" and not last.get("tool_calls")
        fields = {
            "messages": _messages(self.messages),
            "tools": self.tools or None,
            "continue_final_message": continues,
        }
        return as_chat({**self._fields(), **self._chat_fields(), **fields})


class OllamaGenerate(OllamaBody):
    """POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    images: Any = None
    raw: bool | None = None
    suffix: str | None = None

    @property
    def loads(self) -> bool:
        """Without a prompt a client only wants the model in memory."""
        return not self.prompt and not self.suffix

    def chat(self) -> ChatRequest:
        """A conversation of one prompt. Raises InputError or ApiError."""
        user: dict[str, Any] = {"role": "user", "content": self.prompt, "images": self.images}
        system = [{"role": "system", "content": self.system}] if self.system else []
        return as_chat({**self._fields(), **self._chat_fields(), "messages": _messages([*system, user])})

    def completion(self, tokenizer: Tokenizer) -> CompletionRequest:
        """The prompt as it is, or with `suffix` the request for what stands between. Raises InputError or ApiError."""
        if self.system:
            field = "suffix" if self.suffix else "raw: true"
            raise ApiError(400, f"system and {field} exclude each other", param="system")
        prompt: Any = self.prompt
        if self.suffix:
            tokens = fill_tokens(tokenizer)
            if tokens is None:
                raise ApiError(400, "suffix is not supported: this model does not support insert", param="suffix")
            prompt = fill_prompt(tokenizer, tokens, (self.prompt or "",), self.suffix)
        logprobs = {"logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return as_completion({**self._fields(), **logprobs, "prompt": prompt})


class OllamaEmbed(Body):
    """POST /api/embed, and /api/embeddings with `prompt`."""

    input: Any = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class OllamaName(Body):
    """Bodies that name a model."""

    name: str | None = None
    stream: bool | None = None

    @property
    def given(self) -> str:
        """The name. Raises ApiError."""
        name = self.model or self.name
        if not name:
            raise ApiError(400, "model is required", param="model")
        return name


def _messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages as chats have them: pictures are parts, and calls have ids, which their results name."""
    found: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    for message in messages:
        content = message.get("content") or ""
        images = message.get("images") or []
        if images:
            parts = [{"type": "image"} for _ in images]
            content = [{"type": "text", "text": content}, *parts]
        plain: dict[str, Any] = {"role": message.get("role"), "content": content}
        if message.get("thinking"):
            plain["reasoning_content"] = message["thinking"]
        calls = message.get("tool_calls")
        if calls:
            plain["tool_calls"] = calls = [
                _call(f"call_{len(found)}_{index}", call) for index, call in enumerate(calls)
            ]
            open_calls = [(call["function"]["name"], call["id"]) for call in calls]
        if plain["role"] == "tool":
            name = message.get("tool_name") or message.get("name")
            at = next((index for index, (called, _) in enumerate(open_calls) if name in (None, called)), None)
            plain["tool_call_id"] = message.get("tool_call_id") or ("" if at is None else open_calls.pop(at)[1])
            plain |= {"name": name} if name else {}
        found.append(plain)
    return found


def _call(call_id: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"tool_calls must have functions with names, got {one_line(call)}", "messages")
    arguments = function.get("arguments")
    function = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    return {"id": str(call.get("id") or call_id), "type": "function", "function": function}
