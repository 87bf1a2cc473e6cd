"""SGLang's POST /generate: its request, as one of /v1/completions, and its answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, ValidationError, WithJsonSchema

from kvanta.errors import InputError, about
from kvanta.outputs import RequestOutput, TokenLogprobs
from kvanta.params.checks import one_line
from kvanta.server.http.errors import ApiError
from kvanta.server.http.time_slices import MAX_FIELDS
from kvanta.server.jobs.generation_job import Delta, GenerationJob
from kvanta.server.jobs.response import DONE, Encode, GenerationResponse, event
from kvanta.server.openai.logprobs import finite
from kvanta.server.requests.protocol import SAMPLING_FIELDS, CompletionRequest, Prompts, TokenIdLists, TokenIds
from kvanta.server.requests.request_fields import Refused, check_fields, check_refused
from kvanta.text.tokenizer import Tokenizer

MAX_TOKENS = 128
"""SGLang's default of max_new_tokens."""
# Names in sampling_params -> fields of a completion. All others are the same there.
SAMPLING_NAMES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
FIELD_NAMES: Mapping[str, str] = {
    "logprob_token_ids": "token_ids_logprob",
    "thinking_token_budget": "max_thinking_tokens",
}
"""A completion's fields -> those of /generate, outside of sampling_params."""
# Fields of a completion that sampling_params does not have: SGLang has them outside, if at all.
_OUTER = CompletionRequest.model_fields.keys() - SAMPLING_FIELDS.keys() - {"add_special_tokens", "response_format"}
SAMPLING_REFUSED: Mapping[str, Refused] = dict.fromkeys(
    _OUTER | FIELD_NAMES.keys() | {"prompt_logprobs"}, Refused("it is none of its fields")
)
LogprobTuple = tuple[float | None, int, str | None]


class GenerateRequest(BaseModel):
    """POST /generate."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    text: Prompts = None
    input_ids: TokenIdLists = None
    sampling_params: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]})
    ] = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: TokenIds = None
    return_text_in_logprobs: bool | None = None
    max_thinking_tokens: int | None = None
    priority: int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None

    @property
    def prompts(self) -> Any:
        """`text` or `input_ids`."""
        if (self.text is None) == (self.input_ids is None):
            given = "nothing" if self.text is None else "both"
            raise ApiError(400, f"give either text or input_ids, got {given}", param="text")
        return self.input_ids if self.text is None else self.text

    @property
    def given_names(self) -> Mapping[str, str]:
        """A completion's fields -> those of this request."""
        given = self.sampling_params  # checked later, maybe by another thread
        first = given[0] if isinstance(given, list) and given else given
        inner = first if isinstance(first, Mapping) and len(first) <= MAX_FIELDS else {}
        names = {SAMPLING_NAMES.get(name, name): f"sampling_params.{name}" for name in inner}
        return {**names, **FIELD_NAMES, "prompt": "input_ids" if self.text is None else "text"}

    @property
    def is_batch(self) -> bool:
        """The answer is a list."""
        prompts = self.prompts
        return isinstance(prompts, list) and (not prompts or isinstance(prompts[0], (str, list)))

    @property
    def logprobs(self) -> int | None:
        """`logprobs` of SamplingParams."""
        return (self.top_logprobs_num or 0) if self.return_logprob else None

    @property
    def prompt_logprobs(self) -> int | None:
        """`prompt_logprobs` of SamplingParams."""
        return self.logprobs if self.input_start is not None else None

    @property
    def input_start(self) -> int | None:
        """First prompt token whose log-probability is returned; None: no prompt token's is."""
        start = -1 if self.logprob_start_len is None else self.logprob_start_len
        if start < -1:
            message = f"logprob_start_len must be -1 or a position in the prompt, got {start}"
            raise InputError(message, "logprob_start_len")
        return start if self.return_logprob and start >= 0 else None

    def completion(self) -> CompletionRequest:
        """The same request to /v1/completions. Raises ApiError that names the field."""
        check_fields(self.model_extra or {})
        with about("sampling_params"):
            given = self._sampling()
        check_refused(given, SAMPLING_REFUSED, "sampling_params.")
        fields = {SAMPLING_NAMES.get(name, name): value for name, value in given.items()}
        if fields.get("stop") == []:
            del fields["stop"]
        if self.token_ids_logprob and (self.top_logprobs_num or self.input_start is not None):
            other = "top_logprobs_num" if self.top_logprobs_num else "logprob_start_len"
            raise ApiError(400, f"token_ids_logprob and {other} exclude each other", param="token_ids_logprob")
        if self.token_ids_logprob and not self.return_logprob:
            raise ApiError(400, "token_ids_logprob needs return_logprob: true", param="token_ids_logprob")
        outer = {
            "stream": self.stream,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "extra_key": self.extra_key,
            "logprob_token_ids": self.token_ids_logprob,
            "thinking_token_budget": self.max_thinking_tokens,
        }
        try:
            return CompletionRequest(**{"prompt": self.prompts, **fields, **outer})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            name = next((theirs for theirs, ours in SAMPLING_NAMES.items() if ours == where), where)
            message = f"sampling_params.{name}: {first['msg']}, got {one_line(first.get('input'))}"
            raise ApiError(400, message, param=f"sampling_params.{name}") from None

    def _sampling(self) -> Mapping[str, Any]:
        """The parameters of every prompt."""
        given = self.sampling_params
        if isinstance(given, list):
            if not self.is_batch or len(given) != len(self.prompts):
                raise InputError(f"sampling_params has {len(given)} entries, and there are not as many prompts")
            if any(each != given[0] for each in given):
                raise InputError("sampling_params must be the same for all prompts of a request: send several requests")
            given = given[0] if given else None
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            raise InputError(f"sampling_params must be an object, got {one_line(given)}")
        if len(given) > MAX_FIELDS:
            raise InputError(f"sampling_params has {len(given)} fields; at most {MAX_FIELDS} are read")
        return given


class GenerateResponse(GenerationResponse):
    """One object for a prompt and a list for several. Events have the whole text so far, as SGLang's."""

    def __init__(
        self,
        request_id: str,
        request: GenerateRequest,
        job: GenerationJob,
        tokenizer: Tokenizer,
        eos_tokens: Sequence[int],
    ) -> None:
        super().__init__(job)
        self._id = request_id
        self._tokenizer = tokenizer
        self._eos_tokens = frozenset(eos_tokens)
        self._is_list = request.is_batch or len(job.outputs) > 1
        self._names_tokens = bool(request.return_text_in_logprobs)
        self._logprobs = request.logprobs
        self._scored = request.token_ids_logprob or ()
        self._input_start = request.input_start
        self._texts = [""] * len(job.outputs)

    def whole(self) -> object:
        """When the job is finished."""
        for generation in self._job.generations:
            generation.name_prompt_logprobs()
        choices = [self._choice(index) for index in range(len(self._job.outputs))]
        return choices if self._is_list else choices[0]

    def _choice(self, index: int) -> dict[str, Any]:
        whole = self._job.whole(index)
        return self._fields(whole, whole.text)

    def _first_events(self, encode: Encode) -> Iterator[bytes]:
        return iter(())

    def _delta_events(self, delta: Delta, encode: Encode) -> bytes:
        for generation in self._job.generations:
            generation.name_prompt_logprobs()
        self._texts[delta.choice] += delta.text
        piece = self._fields(delta, self._texts[delta.choice])
        return event({**piece, "index": delta.choice} if self._is_list else piece, encode)

    def _last_events(self) -> Iterator[bytes]:
        yield DONE

    def _error_events(self, error: ApiError) -> Iterator[bytes]:
        yield event(error.body())
        yield DONE

    def _entries(self, tokens: int, choices: int) -> int:
        """Every event has all tokens so far."""
        longest = max((len(output.token_ids) for output in self._job.outputs), default=0)
        return super()._entries(max(tokens, longest), choices)

    def _delta_entries(self, delta: Delta) -> int:
        """Every event repeats the entries of its prompt."""
        entries = super()._delta_entries(delta)
        most = self._job.generations[0].params.prompt_logprobs
        if most is None or delta.begin == 0:
            return entries
        return entries + len(self._prompt_of(delta.choice).prompt_token_ids) * (most + 1)

    def _prompt_of(self, choice: int) -> RequestOutput:
        """The output with the prompt of a text."""
        texts = len(self._job.outputs) // len(self._job.generations)
        return self._job.generations[choice // texts].output

    def _fields(self, delta: Delta, text: str) -> dict[str, Any]:
        index, end = delta.choice, delta.end
        output = self._job.outputs[index]
        prompt = self._prompt_of(index)
        meta: dict[str, Any] = {
            "id": self._id if len(self._job.outputs) == 1 else f"{self._id}-{index}",
            "finish_reason": self._finish(delta, output.token_ids),
            "prompt_tokens": len(prompt.prompt_token_ids),
            "weight_version": "default",
            "completion_tokens": end,
            "cached_tokens": prompt.num_cached_tokens,
        }
        if delta.finished:
            meta["e2e_latency"] = time.perf_counter() - self._job.arrival
        if self._logprobs is not None:
            entries: list[TokenLogprobs | None] = [*(output.logprobs or [])[:end]]
            meta["output_token_logprobs"], meta["output_top_logprobs"] = self._tuples(output.token_ids[:end], entries)
            start = len(prompt.prompt_token_ids) if self._input_start is None else self._input_start
            entries = [None, *(prompt.prompt_logprobs or [])[start + 1 :]]  # the first one's is not given
            tokens = prompt.prompt_token_ids[start:]
            meta["input_token_logprobs"], meta["input_top_logprobs"] = self._tuples(tokens, entries[: len(tokens)])
            if self._scored:
                meta["output_token_ids_logprobs"] = [
                    [self._tuple(entry[token].logprob, token) for token in self._scored]
                    for entry in (output.logprobs or [])[:end]
                ]
        return {"text": text, "output_ids": output.token_ids[:end], "meta_info": meta}

    def _finish(self, delta: Delta, tokens: list[int]) -> dict[str, Any] | None:
        if not delta.finished:
            return None
        if delta.finish_reason == "length":
            return {"type": "length", "length": delta.end}
        matched = delta.stop_reason
        if matched is None and tokens and tokens[-1] in self._eos_tokens:
            matched = tokens[-1]
        return {"type": delta.finish_reason, "matched": matched}

    def _tuples(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> tuple[list[LogprobTuple], list[list[LogprobTuple] | None]]:
        """Log-probabilities of each token, and the most likely ones at its position."""
        own = [
            self._tuple(entry[token].logprob if entry else None, token)
            for token, entry in zip(tokens, entries, strict=True)
        ]
        most = self._logprobs or 0
        top = [
            None
            if not entry or not most
            else [self._tuple(each.logprob, token) for token, each in entry.items() if each.rank <= most]
            for entry in entries
        ]
        return own, top

    def _tuple(self, logprob: float | None, token: int) -> LogprobTuple:
        name = self._tokenizer.token_text(token) if self._names_tokens else None
        return None if logprob is None else finite(logprob), token, name
