"""Answers of llama.cpp's /completion and /infill, and the settings that they name."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvanta.outputs import RequestOutput
from kvanta.params.sampling_params import SamplingParams
from kvanta.server.http.errors import ApiError, json_bytes
from kvanta.server.jobs.generation_job import Delta, GenerationJob
from kvanta.server.jobs.response import Encode, GenerationResponse, event
from kvanta.server.llama_cpp.bodies import LlamaCompletion
from kvanta.server.openai.logprobs import finite
from kvanta.text.tokenizer import Tokenizer

_RANDOM_SEED = 2**32 - 1
_SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p")
# Settings of samplers that are off, and of what the server does not have.
_OFF: Mapping[str, Any] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typical_p": 1.0,
    "repeat_last_n": -1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": [],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "post_sampling_probs": False,
    "lora": [],
}


def generation_settings(params: SamplingParams, *, stream: bool = False) -> dict[str, Any]:
    """The parameters of a request under llama.cpp's names."""
    given = params.structured_outputs
    grammar = None if given is None else given.grammar
    stop = params.stop or []
    most = -1 if params.max_tokens is None else params.max_tokens
    return {
        "seed": _RANDOM_SEED if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": max(0, params.top_k),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        **_OFF,
        "stop": [stop] if isinstance(stop, str) else list(stop),
        "max_tokens": most,
        "n_predict": most,
        "ignore_eos": params.ignore_eos,
        "stream": stream,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in (params.logit_bias or {}).items()],
        "n_probs": params.logprobs or 0,
        "grammar": grammar or "",
        "samplers": list(_SAMPLERS),
    }


def nested_values(paths: Sequence[str], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an answer, each under the last name of its path ("timings/prompt_n"); unknown ones are left out."""
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = answer
        names = path.split("/")
        for name in names:
            if not isinstance(value, Mapping) or name not in value:
                break
            value = value[name]
        else:
            found[names[-1]] = value
    return found


class LlamaAnswer(GenerationResponse):
    """The answer of /completion: an object for a prompt, and a list for several."""

    def __init__(self, model: str, request: LlamaCompletion, job: GenerationJob, tokenizer: Tokenizer) -> None:
        super().__init__(job)
        self._model = model
        self._with_tokens = bool(request.return_tokens)
        self._with_probabilities = bool(request.n_probs)
        self._tokenizer = tokenizer
        self._fields = request.answer_fields
        self._prompt_only = request.n_predict == 0
        settings = generation_settings(job.generations[0].params, stream=bool(request.stream))
        self._settings = {**settings, "max_tokens": 0, "n_predict": 0} if self._prompt_only else settings

    def whole(self) -> Any:
        """When the job is finished."""
        answers = [self._finished(self._job.whole(index)) for index in range(len(self._job.outputs))]
        return answers if len(answers) > 1 else answers[0]

    def _piece(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.choice,
            "content": "" if self._prompt_only else delta.text,
            "tokens": self._tokens(delta),
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._count(delta),
            "tokens_evaluated": len(self._prompt_of(delta).prompt_token_ids),
            **self._probabilities(delta),
        }

    def _finished(self, delta: Delta) -> dict[str, Any]:
        prompt, now = self._prompt_of(delta), time.perf_counter()
        tokens, cached = len(prompt.prompt_token_ids), prompt.num_cached_tokens
        first = self._job.first_token_at or now
        kind = "limit" if delta.finish_reason == "length" else "word" if isinstance(delta.stop_reason, str) else "eos"
        answer = {
            **self._piece(delta),
            "stop": True,
            "model": self._model,
            "generation_settings": self._settings,
            "prompt": prompt.prompt or "",
            "truncated": False,
            "has_new_line": not self._prompt_only and "\n" in self._job.outputs[delta.choice].text,
            "stop_type": kind,
            "stopping_word": delta.stop_reason if isinstance(delta.stop_reason, str) else "",
            "tokens_cached": cached,
            "timings": {
                **_timing("prompt", tokens - cached, first - self._job.arrival),
                **_timing("predicted", self._count(delta), now - first),
                "cache_n": cached,
            },
        }
        return nested_values(self._fields, answer) if self._fields else answer

    def _count(self, delta: Delta) -> int:
        """Tokens of a text so far; the engine makes one where none is wanted."""
        return 0 if self._prompt_only else delta.end

    def _completion_tokens(self) -> int:
        return 0 if self._prompt_only else super()._completion_tokens()

    def _prompt_of(self, delta: Delta) -> RequestOutput:
        texts = len(self._job.outputs) // len(self._job.generations)
        return self._job.generations[delta.choice // texts].output

    def _tokens(self, delta: Delta) -> list[int]:
        shows = self._with_tokens and not self._prompt_only
        return self._job.outputs[delta.choice].token_ids[delta.begin : delta.end] if shows else []

    def _probabilities(self, delta: Delta) -> dict[str, Any]:
        if not self._with_probabilities or self._prompt_only:
            return {}
        output = self._job.outputs[delta.choice]
        positions = zip(output.token_ids, output.logprobs or [], strict=False)
        found = []
        for token, entries in list(positions)[delta.begin : delta.end]:
            top = [self._entry(other, float(entry.logprob)) for other, entry in entries.items()]
            found.append({**self._entry(token, float(entries[token].logprob)), "top_logprobs": top})
        return {"completion_probabilities": found}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.bytes[token]
        return {"id": token, "token": data.decode(errors="replace"), "bytes": list(data), "logprob": finite(logprob)}

    def _first_events(self, encode: Encode) -> Iterator[bytes]:
        yield from ()

    def _delta_events(self, delta: Delta, encode: Encode) -> bytes:
        has_new = delta.text or delta.end > delta.begin
        events = event(self._piece(delta), encode) if has_new and not self._prompt_only else b""
        if delta.finished:
            end = Delta(delta.choice, "", delta.end, delta.end, delta.finish_reason, delta.stop_reason)
            events += event(self._finished(end), encode)
        return events

    def _last_events(self) -> Iterator[bytes]:
        yield from ()

    def _error_events(self, error: ApiError) -> Iterator[bytes]:
        yield event(error.llama_body(), json_bytes)


def _timing(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    """Tokens and times of a part of the work, in milliseconds."""
    count, seconds = max(0, tokens), max(seconds, 1e-9)
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / max(1, count),
        f"{name}_per_second": count / seconds,
    }
