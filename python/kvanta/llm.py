"""LLM: a model with its tokenizer and its engine, for use inside one program."""

from __future__ import annotations

import random
import warnings
from collections.abc import Generator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta import _core
from kvanta.calibration.automatic import add_query_matrices
from kvanta.constraints.loose_schema import loosened_keywords
from kvanta.engine import beam_search
from kvanta.engine.beam_search import BeamSearchOutput, BeamSearchParams
from kvanta.engine.cache_reader import CacheReader
from kvanta.engine.embedding_methods import EmbeddingMethods
from kvanta.engine.generation import Generation
from kvanta.engine.loaded_model import LoadedModel
from kvanta.engine.step_loop import EngineRunner
from kvanta.errors import InputError
from kvanta.options.engine import EngineOptions
from kvanta.options.foreign import known_arguments
from kvanta.options.model import ModelOptions
from kvanta.options.option import accepts_options
from kvanta.outputs import RequestOutput, TokenLogprobs
from kvanta.params.checks import one_line, truth, whole_number
from kvanta.params.kv_cache_events import check_events, engine_events
from kvanta.params.sampling_params import SamplingParams
from kvanta.terminal.progress import UseTqdm, progress_bar
from kvanta.text.chat_messages import Messages, plain_messages
from kvanta.text.prompts import (
    Prompt,
    TokenPrompt,
    check_content_format,
    one_each,
    read_priorities,
    read_prompt,
    refuse_arguments,
    split_prompts,
    token_list,
    truncated,
)
from kvanta.text.tokenizer import Tokenizer


class LLM(EmbeddingMethods):
    """Loads a model and reserves its cache; docs/python.md has the options. Raises InputError or ResourceError.

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
        self._loaded = LoadedModel(model, arguments, tokenizer, chat_template, add_matrices=add_query_matrices)
        self.model = self._loaded.name
        self.tokenizer = self._loaded.tokenizer
        self._engine = self._loaded.engine
        self._runner = EngineRunner(self._engine, self._loaded.warnings)
        self._runner.warn(stacklevel=3)
        self._reader = CacheReader(self._engine, self._runner.lock)
        self._seeds = random.Random(self.config.seed)

    def __repr__(self) -> str:
        return f"LLM({self.model!r}: {self._loaded.summary()})"

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

        A SamplingParams made by the caller is used unchanged.
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
        use_tqdm: UseTqdm = None,
        lora_request: None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in their order. Several parameters: one per prompt; so for priorities. A mapping with
        "prompt" or "prompt_token_ids" may have a "cache_salt": prompts with different ones share no cached prefixes.

        `use_tqdm`: a progress bar, or a callable that makes one; None means for several prompts on a terminal.
        `priority`: smaller runs first. `lora_request`, `tokenization_kwargs`: for compatibility, None alone.
        """
        refuse_arguments(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        entries = [read_prompt(prompt, self.tokenizer) for prompt in split_prompts(prompts)]
        return self._generate(entries, self._one_each(sampling_params, len(entries)), use_tqdm, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = None,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The assistant's answers to one conversation, or to several. The order of arguments is vLLM's.

        `chat_template`: a Jinja2 template instead of the model's. `chat_template_content_format`: for compatibility,
        "auto" or "string". `continue_final_message`: the answer continues the last message; needs
        add_generation_prompt=False. `mm_processor_kwargs`: no effect. Other arguments: as `generate`.
        """
        refuse_arguments(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        check_content_format(chat_template_content_format)
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
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The best continuations of every prompt. Each step is a request per beam, which the prefix cache shortens.

        `concurrency_limit`: number of prompts that are searched together.
        """
        refuse_arguments(lora_request=lora_request)
        if not isinstance(params, BeamSearchParams):
            raise InputError(f"params must be BeamSearchParams, got {one_line(params)}")
        entries = [read_prompt(prompt, self.tokenizer) for prompt in split_prompts(prompts)]
        most = min(2 * params.beam_width, int(self.model_info.vocab))
        one_token = SamplingParams(max_tokens=1, temperature=0.0, logprobs=most, ignore_eos=True)

        def next_tokens(beams: list[TokenPrompt]) -> list[TokenLogprobs]:
            outputs = self._generate(beams, [one_token] * len(beams), use_tqdm)
            return [(output.outputs[0].logprobs or [{}])[0] for output in outputs]

        ends, limit = self.model_info.eos_token_ids, self.config.max_model_len
        together = max(1, len(entries))
        if concurrency_limit is not None:
            together = whole_number("concurrency_limit", concurrency_limit, 1, 2**31 - 1, " or None")
        found: list[BeamSearchOutput] = []
        for begin in range(0, len(entries), together):
            found += beam_search.search(entries[begin : begin + together], params, next_tokens, ends, limit)
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
        """The prompt that the chat template makes of a conversation. Contents may be lists of parts of type `text`."""
        if continue_final_message and add_generation_prompt:
            raise InputError("continue_final_message needs add_generation_prompt=False, got True")
        text = self.tokenizer.apply_chat_template(
            plain_messages(messages),
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
        for _, text in self._runner.run([request], lambda _: request.add_to(self._engine, self._seeds)):
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
        kv_cache_events: Sequence[Mapping[str, Any]] = (),
    ) -> NDArray[np.float32]:
        """float32 [tokens, vocab]: row i predicts token i + 1, teacher-forced through the paged, quantized cache.

        `chunk_tokens` (default: max_num_batched_tokens) changes the speed, not one bit of the result.
        `kv_cache_events`: of an answer with a `kv_cache_floor`, whose predictions these are.
        """
        vocab, limit = self.model_info.vocab, self.config.max_model_len
        tokens = np.asarray(token_list(token_ids, vocab), dtype=np.int32)
        if len(tokens) > limit:  # before memory is taken for them
            raise InputError(f"the sequence has {len(tokens)} tokens, max_model_len is {limit}")
        chunk = 0 if chunk_tokens is None else whole_number("chunk_tokens", chunk_tokens, 1, 2**31 - 1, " or None")
        from_cache = truth("use_prefix_cache", use_prefix_cache)
        events = engine_events(check_events("kv_cache_events", kv_cache_events))
        with self._runner.lock:
            out = np.empty((len(tokens), vocab), dtype=np.float32)
            self._engine.logits(tokens, chunk, out, from_cache, events)
            self._runner.warn(stacklevel=3)
        return out

    def kv_statistics(
        self, token_ids: Sequence[int] | NDArray[Any], key_means: NDArray[np.float32] | None = None
    ) -> dict[str, Any]:
        """Magnitudes and moments of the keys and values of one sequence, through exact pages that are not kept.

        `key_means`: float32 [layers, kv_heads, head_dim], subtracted from K first. Keys of the result: tokens; edges
        [bins + 1] and histogram [layers, 2, kv_heads, bins] of magnitudes; amax, sum, square_sum [layers, 2, kv_heads,
        head_dim]; axis 1 is K, V. Sizes are the largest of any layer; smaller layers are padded
        with zeros (model_info.layer_heads). kvanta.calibration makes scales of it.
        """
        return self._reader.kv_statistics(token_ids, key_means)

    def query_moments(
        self, token_ids: Sequence[int] | NDArray[Any], weighted: bool = True, context_lengths: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Second moments of one sequence's keys and queries: kvanta.calibration makes the matrices of +query of them.

        Result: tokens but the first page's; amax [layers, 2, kv_heads] of K, V; key_sum [layers, kv_heads, head_dim];
        key_moment, query_moment [layers, kv_heads, head_dim, head_dim]: sums of k k^T, q q^T; if `weighted`,
        weighted_query_moment, for klt3. `context_lengths`: averages over all their positions, not the text's own.
        """
        return self._reader.query_moments(token_ids, weighted, context_lengths)

    def stats(self) -> dict[str, Any]:
        """Counters of the engine: bytes per token, pages used and free, prefix hits, saturated values, and more."""
        return self._loaded.stats()

    def measure_quality(self) -> dict[str, Any]:
        """Distance of what was generated from an exact cache's distribution: requests compared, their tokens, kl_mean
        and kl_max in nats. Compares now what quality_sample_rate has chosen since the last call.
        """
        with self._runner.lock:
            while self._engine.measure_quality():
                pass
        quality: dict[str, Any] = self._engine.stats()["quality"]
        return quality

    def reset_prefix_cache(self) -> None:
        """Drops every cached prefix that is not in use."""
        self._engine.reset_prefix_cache()

    def _one_each(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        return one_each("sampling_params", params, self.get_default_sampling_params(), count)

    def _generate(
        self,
        entries: list[TokenPrompt],
        params: list[SamplingParams],
        use_tqdm: UseTqdm,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        priorities = read_priorities(priority, len(entries))
        show = use_tqdm if use_tqdm is not None or len(entries) > 1 else False
        requests = [self._prepare(entry, each) for entry, each in zip(entries, params, strict=True)]
        with progress_bar(len(requests), "generating", "prompt", show) as bar:
            for request, _ in self._runner.run(
                requests, lambda index: requests[index].add_to(self._engine, self._seeds, priority=priorities[index])
            ):
                if request.output.finished:
                    bar.update()
        return [request.output for request in requests]

    def _prepare(self, entry: TokenPrompt, params: SamplingParams) -> Generation:
        name = self._runner.next_name()
        entry = truncated(entry, params, self.tokenizer, self.config.max_model_len)
        params = params.with_all_logprobs(int(self.model_info.vocab))
        constraint = params.structured_outputs
        if constraint is not None and (lost := loosened_keywords(constraint.schemas)):
            warnings.warn(f"structured_outputs: a grammar cannot hold a text to all of {', '.join(lost)}", stacklevel=4)
        return Generation(name, entry, params, self.tokenizer, self._loaded.grammars)
