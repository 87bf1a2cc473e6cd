"""Answers of Ollama's API: one object, or a stream of objects, a line each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from kvanta.parsers.answer import AnswerShape
from kvanta.server.http.errors import ApiError, json_bytes
from kvanta.server.jobs.answer_parts import AnswerPart, PartsResponse
from kvanta.server.jobs.generation_job import Delta, GenerationJob
from kvanta.server.jobs.response import Encode, GenerationResponse
from kvanta.server.openai.logprobs import LogprobsWriter
from kvanta.server.requests.protocol import ChatRequest
from kvanta.text.tokenizer import Tokenizer

NDJSON = "application/x-ndjson"
_REASONS = {"length": "length"}


def created() -> str:
    """The time of a part of an answer."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def line(value: object, encode: Encode = json_bytes) -> bytes:
    """One line of a stream."""
    return encode(value) + b"\n"


def loaded(model: str, key: str, unloads: bool) -> dict[str, Any]:
    """The answer to a request without a prompt. `key`: of the text."""
    text: Any = {"role": "assistant", "content": ""} if key == "message" else ""
    reason = "unload" if unloads else "load"
    return {"model": model, "created_at": created(), key: text, "done": True, "done_reason": reason}


class Logprobs:
    """Log-probabilities of an answer's tokens, those of each piece with it, and of tokens without text later."""

    def __init__(self, job: GenerationJob, tokenizer: Tokenizer) -> None:
        self._output = job.outputs[0]
        self._most = job.generations[0].params.logprobs
        self._writer = LogprobsWriter(tokenizer, self._most)
        self._shown = 0

    def until(self, end: int) -> dict[str, Any]:
        """The field with the entries of the tokens before `end` that have not been shown; empty without any."""
        begin, self._shown = self._shown, max(self._shown, end)
        if self._most is None or end <= begin:
            return {}
        tokens, entries = self._output.token_ids[begin:end], (self._output.logprobs or [])[begin:end]
        found = self._writer.chat(tokens, entries)["content"]
        if not self._most:
            found = [{name: value for name, value in each.items() if name != "top_logprobs"} for each in found]
        return {"logprobs": found}

    def whole(self, end: int) -> dict[str, Any]:
        """The field with the entries of all tokens."""
        self._shown = 0
        return self.until(end)


class OllamaAnswer(PartsResponse):
    """The answer of /api/chat, or with `is_generate` of /api/generate."""

    media_type = NDJSON

    def __init__(
        self,
        model: str,
        request: ChatRequest,
        job: GenerationJob,
        shape: AnswerShape,
        tokenizer: Tokenizer,
        *,
        is_generate: bool,
    ) -> None:
        super().__init__(request, job, shape)
        self._model = model
        self._is_generate = is_generate
        self._logprobs = Logprobs(job, tokenizer)
        self.ping = line(self._text(""))

    def whole(self) -> dict[str, Any]:
        """When the job is finished."""
        delta = self._read_whole()
        text = "".join(part.text for part in self._parts if part.kind == "text")
        thinking = "".join(part.text for part in self._parts if part.kind == "reasoning")
        calls = [_call(part) for part in self._parts if part.kind == "call"]
        logprobs = self._logprobs.whole(delta.end)
        return {**self._text(text, thinking, calls), **logprobs, **ending(self._job, delta, self.usage())}

    def _text(self, text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        head = {"model": self._model, "created_at": created()}
        extra = {"thinking": thinking} if thinking else {}
        if self._is_generate:
            return {**head, "response": text, **extra, "done": False}
        message = {"role": "assistant", "content": text, **extra, **({"tool_calls": calls} if calls else {})}
        return {**head, "message": message, "done": False}

    def _begin(self) -> Iterator[dict[str, Any]]:
        yield from ()

    def _opened(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        yield from ()

    def _grown(self, part: AnswerPart, text: str, tokens: slice) -> Iterator[dict[str, Any]]:
        if part.kind != "call":
            shown = self._text(text) if part.kind == "text" else self._text("", text)
            yield {**shown, **self._logprobs.until(tokens.stop)}

    def _closed(self, part: AnswerPart, finish_reason: str | None) -> Iterator[dict[str, Any]]:
        if part.kind == "call":  # whose arguments are an object, complete at last
            yield self._text("", calls=[_call(part)])

    def _end(self, delta: Delta) -> Iterator[dict[str, Any]]:
        yield {**self._text(""), **self._logprobs.until(delta.end), **ending(self._job, delta, self.usage())}

    def _failed(self, error: ApiError) -> dict[str, Any]:
        return {"error": error.detail}

    def _write(self, value: dict[str, Any], encode: Encode) -> bytes:
        return line(value, encode)


class RawAnswer(GenerationResponse):
    """The answer of /api/generate with `raw`: the text that follows the prompt."""

    media_type = NDJSON

    def __init__(self, model: str, job: GenerationJob, tokenizer: Tokenizer) -> None:
        super().__init__(job)
        self._model = model
        self._logprobs = Logprobs(job, tokenizer)
        self.ping = line(self._text(""))

    def _text(self, text: str) -> dict[str, Any]:
        return {"model": self._model, "created_at": created(), "response": text, "done": False}

    def whole(self) -> dict[str, Any]:
        """When the job is finished."""
        delta = self._job.whole(0)
        return {**self._text(delta.text), **self._logprobs.until(delta.end), **ending(self._job, delta, self.usage())}

    def _first_events(self, encode: Encode) -> Iterator[bytes]:
        yield from ()

    def _delta_events(self, delta: Delta, encode: Encode) -> bytes:
        text = line({**self._text(delta.text), **self._logprobs.until(delta.end)}, encode) if delta.text else b""
        if not delta.finished:
            return text
        last = {**self._text(""), **self._logprobs.until(delta.end), **ending(self._job, delta, self.usage())}
        return text + line(last, encode)

    def _last_events(self) -> Iterator[bytes]:
        yield from ()

    def _error_events(self, error: ApiError) -> Iterator[bytes]:
        yield line({"error": error.detail})


def ending(job: GenerationJob, delta: Delta, usage: dict[str, Any]) -> dict[str, Any]:
    """Reason, numbers of tokens, and measured times in nanoseconds."""
    now = time.perf_counter()
    first = job.first_token_at or now
    return {
        "done": True,
        "done_reason": _REASONS.get(delta.finish_reason or "", "stop"),
        "total_duration": _nanoseconds(now - job.arrival),
        "load_duration": 0,
        "prompt_eval_count": usage["prompt_tokens"],
        "prompt_eval_duration": _nanoseconds(first - job.arrival),
        "eval_count": usage["completion_tokens"],
        "eval_duration": _nanoseconds(now - first),
    }


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _call(part: AnswerPart) -> dict[str, Any]:
    """A call; its arguments are an object, empty where the end of the answer has cut them off."""
    try:
        arguments = json.loads(part.text or "{}")
    except (ValueError, RecursionError):
        arguments = {}
    arguments = arguments if isinstance(arguments, dict) else {}
    return {"id": part.call_id, "function": {"name": part.name, "arguments": arguments}}
