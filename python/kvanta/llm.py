"""LLM: a model with its tokenizer and its engine, for use inside one program."""

from __future__ import annotations

import dataclasses
import random
import threading
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta import _core, beam_search
from kvanta.beam_search import BeamSearchOutput, BeamSearchParams
from kvanta.compat_options import known_arguments
from kvanta.engine_options import EngineOptions
from kvanta.errors import InputError
from kvanta.generation import Generation
from kvanta.loaded_model import LoadedModel
from kvanta.model_options import ModelOptions
from kvanta.options import accepts_options
from kvanta.outputs import RequestOutput, TokenLogprobs
from kvanta.progress import progress_bar
from kvanta.prompts import Prompt, TokenPrompt, read_prompt, split_prompts, token_list, truncated
from kvanta.sampling_params import SamplingParams
from kvanta.tokenizer import Tokenizer
from kvanta.values import one_line, truth, whole_number

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """Loads a model and reserves its cache; see the README for the options. Raises InputError or ResourceError.

    Calls may overlap, from several threads or while a stream is open: each step of the engine serves all of them.
    """

    @accepts_options(ModelOptions)
    @accepts_options(EngineOptions)
    def __init__(
        self,
        model: str | PathLike[str],
        *,
        tokenizer: str | PathLike[str] | None = None,
        chat_template: str | PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        """`tokenizer`: another model to take it from. `chat_template`: a file, or the Jinja2 template itself.

        `options`: EngineOptions and ModelOptions by name or alias; options of other engines are accepted or refused as
        the server does.
        """
        arguments, notes = known_arguments(options)
        for note in notes:
            warnings.warn(note, stacklevel=2)
        self._loaded = LoadedModel(model, arguments, tokenizer, chat_template)
        self.model = self._loaded.name
        self.tokenizer = self._loaded.tokenizer
        self._warnings = self._loaded.warnings
        self._engine = self._loaded.engine
        self._warn(stacklevel=3)
        # Reentrant: a forgotten stream may be collected, and so closed, while this thread holds the lock.
        self._lock = threading.RLock()
        self._inboxes: dict[str, deque[_core.EngineOutput]] = {}  # by request id: outputs for open calls
        self._count = 0
        self._seeds = random.Random(self.config.seed)

    @property
    def config(self) -> _core.EngineConfig:
        """The engine's configuration, with every "auto" resolved."""
        return self._engine.config

    @property
    def model_info(self) -> _core.ModelInfo:
        """Sizes of the model."""
        return self._engine.info

    @property
    def default_sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that generation_config.json, or its override, gives."""
        return dict(self._loaded.default_sampling)

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters of calls that give none: those of the model's generation_config.json, as `generation_config` says.

        A SamplingParams made by the caller is used as it is.
        """
        return SamplingParams(**self.default_sampling)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] | None = None,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in their order. Several parameters: one per prompt; so for priorities.

        `use_tqdm`: a progress bar; None means for several prompts on a terminal. `priority`: smaller runs first.
        `lora_request`: for compatibility, None alone.
        """
        _refuse_lora(lora_request)
        entries = [read_prompt(prompt, self.tokenizer) for prompt in split_prompts(prompts)]
        return self._generate(entries, self._one_each(sampling_params, len(entries)), use_tqdm, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] | None = None,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """The assistant's answers to one conversation, or to several.

        `chat_template`: a Jinja2 template instead of the model's. `continue_final_message`: the answer continues the
        last message; needs add_generation_prompt=False. Other arguments: as `generate`.
        """
        _refuse_lora(lora_request)
        several = bool(messages) and isinstance(messages, Sequence) and isinstance(messages[0], (list, tuple))
        conversations: Any = messages if several else [messages]
        entries = [
            self.chat_prompt(
                chat,
                tools,
                chat_template_kwargs,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for chat in conversations
        ]
        return self._generate(entries, self._one_each(sampling_params, len(entries)), use_tqdm, priority)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool | None = False
    ) -> list[BeamSearchOutput]:
        """The best continuations of every prompt. Each step is a request per beam, which the prefix cache shortens."""
        if not isinstance(params, BeamSearchParams):
            raise InputError(f"params must be BeamSearchParams, got {one_line(params)}")
        entries = [read_prompt(prompt, self.tokenizer) for prompt in split_prompts(prompts)]
        most = min(2 * params.beam_width, int(self.model_info.vocab))
        one_token = SamplingParams(max_tokens=1, temperature=0.0, logprobs=most, ignore_eos=True)

        def next_tokens(sequences: list[list[int]]) -> list[TokenLogprobs]:
            beams = [TokenPrompt(None, tokens) for tokens in sequences]
            outputs = self._generate(beams, [one_token] * len(beams), use_tqdm)
            return [(output.outputs[0].logprobs or [{}])[0] for output in outputs]

        ends, limit = self.model_info.eos_token_ids, self.config.max_model_len
        found = beam_search.search([entry.token_ids for entry in entries], params, next_tokens, ends, limit)
        for output in found:
            for beam in output.sequences:
                beam.text = self.tokenizer.decode(beam.tokens, skip_special_tokens=params.skip_special_tokens)
        return found

    def chat_prompt(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> TokenPrompt:
        """The prompt that the chat template makes of a conversation."""
        if continue_final_message and add_generation_prompt:
            raise InputError("continue_final_message needs add_generation_prompt=False, got True")
        text = self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=chat_template_kwargs,
            chat_template=chat_template,
        )
        return TokenPrompt(text, self.tokenizer.encode(text, add_special_tokens=False))

    def stream(
        self, prompt: Prompt | TokenPrompt, sampling_params: SamplingParams | None = None
    ) -> Generator[tuple[str, RequestOutput], None, None]:
        """Generates for one prompt and yields, step by step (or stream_interval tokens), the new text and the output.

        The same output object grows and is yielded every time. Leaving the loop early, or closing the generator, aborts
        the request; other calls may go on in between.
        """
        entry = prompt if isinstance(prompt, TokenPrompt) else read_prompt(prompt, self.tokenizer)
        (params,) = self._one_each(sampling_params, 1)
        if params.n != 1:
            raise InputError(f"stream gives one text; n is {params.n}")
        request = self._prepare(entry, params)
        output, held, yielded = request.output.outputs[0], "", 0
        for _, text in self._run([request], [0]):
            held += text
            tokens = len(output.token_ids)
            if yielded == 0 or tokens - yielded >= (params.stream_interval or 1) or output.finished:
                yield held, request.output
                held, yielded = "", tokens

    def logits(
        self,
        token_ids: Sequence[int] | NDArray[Any],
        chunk_tokens: int | None = None,
        *,
        use_prefix_cache: bool = False,
    ) -> NDArray[np.float32]:
        """float32 [tokens, vocab]: row i predicts token i + 1, teacher-forced through the paged, quantized cache.

        `chunk_tokens` (default: max_num_batched_tokens) changes the speed, not one bit of the result.
        """
        vocab, limit = self.model_info.vocab, self.config.max_model_len
        tokens = np.asarray(token_list(token_ids, vocab), dtype=np.int32)
        if len(tokens) > limit:  # before memory is taken for them
            raise InputError(f"the sequence has {len(tokens)} tokens, max_model_len is {limit}")
        chunk = 0 if chunk_tokens is None else whole_number("chunk_tokens", chunk_tokens, 1, 2**31 - 1, " or None")
        from_cache = truth("use_prefix_cache", use_prefix_cache)
        with self._lock:
            out = np.empty((len(tokens), vocab), dtype=np.float32)
            self._engine.logits(tokens, chunk, out, from_cache)
            self._warn(stacklevel=3)
        return out

    def kv_statistics(
        self, token_ids: Sequence[int] | NDArray[Any], key_means: NDArray[np.float32] | None = None
    ) -> dict[str, Any]:
        """Magnitudes and moments of the keys and values of one sequence, through exact pages that are not kept.

        `key_means`: float32 [layers, kv_heads, head_dim], subtracted from K first. Keys of the result: tokens; edges
        [bins + 1] and histogram [layers, 2, kv_heads, bins] of magnitudes; amax, sum, square_sum [layers, 2, kv_heads,
        head_dim]; axis 1 is K, V. kvanta.calibration makes scales of it.
        """
        tokens = np.asarray(token_list(token_ids, self.model_info.vocab), dtype=np.int32)
        means = None if key_means is None else np.ascontiguousarray(key_means, dtype=np.float32)
        with self._lock:
            return self._engine.statistics(tokens, means)

    def stats(self) -> dict[str, Any]:
        """Counters of the engine: bytes per token, pages used and free, prefix hits, saturated values, and more."""
        return self._loaded.stats()

    def measure_quality(self) -> dict[str, Any]:
        """Distance of what was generated from an exact cache's distribution: requests compared, their tokens, kl_mean
        and kl_max in nats. Compares now what quality_sample_rate has chosen since the last call.
        """
        with self._lock:
            while self._engine.measure_quality():
                pass
        quality: dict[str, Any] = self._engine.stats()["quality"]
        return quality

    def reset_prefix_cache(self) -> None:
        """Drops every cached prefix that is not in use."""
        self._engine.reset_prefix_cache()

    def _one_each(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.get_default_sampling_params()] * count
        if not isinstance(params, (list, tuple)) or not all(isinstance(entry, SamplingParams) for entry in params):
            raise InputError(f"sampling_params must be a SamplingParams or a list of them, got {one_line(params)}")
        if len(params) != count:
            raise InputError(f"there are {len(params)} sampling parameters for {count} prompts")
        return [dataclasses.replace(each) for each in params]  # checks again: fields may have been assigned since

    def _generate(
        self,
        entries: list[TokenPrompt],
        params: list[SamplingParams],
        use_tqdm: bool | None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        priorities = _priorities(priority, len(entries))
        show = use_tqdm if use_tqdm is not None or len(entries) > 1 else False
        requests = [self._prepare(entry, each) for entry, each in zip(entries, params, strict=True)]
        with progress_bar(len(requests), "generating", "prompt", show) as bar:
            for request, _ in self._run(requests, priorities):
                if request.output.finished:
                    bar.update()
        return [request.output for request in requests]

    def _prepare(self, entry: TokenPrompt, params: SamplingParams) -> Generation:
        with self._lock:
            name = str(self._count)
            self._count += 1
        entry = truncated(entry, params, self.tokenizer, self.config.max_model_len)
        return Generation(name, entry, params, self.tokenizer, self._loaded.grammars)

    def _run(self, requests: list[Generation], priorities: list[int]) -> Iterator[tuple[Generation, str]]:
        """Adds the requests and steps the engine until all are finished; yields each request's new text.

        The lock is held for single steps only, never while the caller handles an output.
        """
        inbox: deque[_core.EngineOutput] = deque()
        owners: dict[str, Generation] = {}
        try:
            with self._lock:
                for request, priority in zip(requests, priorities, strict=True):
                    for name in request.completions:
                        owners[name] = request
                        self._inboxes[name] = inbox
                    request.add_to(self._engine, self._seeds, priority=priority)
            while owners:
                self._wait_for_output(inbox)
                engine_output = inbox.popleft()
                if engine_output.id not in owners:  # the final output of a request that a stop string has ended
                    continue
                request = owners[engine_output.id]
                text = request.take(engine_output)
                if request.completions[engine_output.id].output.finished:
                    del owners[engine_output.id]
                    self._leave(
                        [engine_output.id], abort=engine_output.finish == _core.FinishReason.NONE
                    )  # a stop string ended it
                yield request, text
        finally:
            self._leave(list(owners), abort=True)  # an error, Ctrl-C, or a caller that has left the loop

    def _wait_for_output(self, inbox: deque[_core.EngineOutput]) -> None:
        """Steps until `inbox` is not empty; steps of other calls may fill it as well."""
        while not inbox:
            with self._lock:
                if not inbox and not self._step():
                    raise RuntimeError("the engine has nothing to do, but requests are not finished")

    def _step(self) -> bool:
        """Runs one step of the engine and distributes its outputs; False when there was nothing to do."""
        step = self._engine.step()
        for engine_output in step or ():
            if engine_output.id in self._inboxes:
                self._inboxes[engine_output.id].append(engine_output)
        self._warn(stacklevel=7)
        return step is not None

    def _leave(self, names: list[str], *, abort: bool) -> None:
        """Removes requests; the last call drains the engine, so that it is idle afterwards."""
        with self._lock:
            for name in names:
                self._inboxes.pop(name, None)
                if abort:
                    self._engine.abort(name)
            while not self._inboxes and self._step():
                pass

    def _warn(self, stacklevel: int) -> None:
        """Issues the engine's warnings on the caller's thread."""
        while self._warnings:
            warnings.warn(self._warnings.pop(0), stacklevel=stacklevel)


def _refuse_lora(lora_request: object) -> None:
    if lora_request is not None:
        raise InputError(
            f"lora_request is not supported, got {one_line(lora_request)}: merge the adapter into the weights"
        )


def _priorities(priority: int | Sequence[int] | None, count: int) -> list[int]:
    """One per prompt."""
    given = list(priority) if isinstance(priority, (list, tuple)) else [0 if priority is None else priority] * count
    if len(given) != count:
        raise InputError(f"priority has {len(given)} entries for {count} prompts")
    return [whole_number("priority", each, -(2**31), 2**31 - 1) for each in given]
