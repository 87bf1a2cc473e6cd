"""Methods of LLM that pool hidden states: embeddings, and their similarities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvanta import _core
from kvanta.engine.embedding import Embedding, paired, similarity
from kvanta.engine.loaded_model import LoadedModel
from kvanta.engine.step_loop import EngineRunner
from kvanta.errors import InputError
from kvanta.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from kvanta.params.checks import one_line
from kvanta.params.pooling_params import PoolingParams
from kvanta.terminal.progress import UseTqdm, progress_bar
from kvanta.text.prompts import Prompt, one_each, read_prompt, refuse_arguments, split_prompts, truncated
from kvanta.text.tokenizer import Tokenizer


class EmbeddingMethods:
    """Base class of LLM, which sets the attributes."""

    tokenizer: Tokenizer
    _engine: _core.Engine
    _loaded: LoadedModel
    _runner: EngineRunner

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: UseTqdm = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of every prompt: its pooled hidden states, as PoolingParams says. `use_tqdm`, `lora_request`,
        `tokenization_kwargs`: as LLM.generate.
        """
        refuse_arguments(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        return [
            EmbeddingRequestOutput(
                each.request_id,
                EmbeddingOutput(each.outputs.data.tolist()),
                each.prompt_token_ids,
                each.num_cached_tokens,
            )
            for each in self._embed(prompts, pooling_params, use_tqdm)
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str = "embed",
        use_tqdm: UseTqdm = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Embeds as `embed`, into float32 arrays. `pooling_task`: for compatibility, "embed" alone."""
        refuse_arguments(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        if pooling_task != "embed":
            raise InputError(f"pooling_task must be embed, got {one_line(pooling_task)}: there are embeddings alone")
        return self._embed(prompts, pooling_params, use_tqdm)

    def score(
        self,
        text_1: Prompt | Sequence[Prompt],
        text_2: Prompt | Sequence[Prompt],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ScoringRequestOutput]:
        """Cosine similarities of embeddings, as vLLM's for embedding models: of pairs, or of one text with several."""
        refuse_arguments(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        left, right = split_prompts(text_1), split_prompts(text_2)
        if len(left) not in (1, len(right)):
            raise InputError(f"score needs pairs, or one text and several, got {len(left)} and {len(right)} texts")
        outputs = self._embed([*left, *right], pooling_params, use_tqdm)
        return [
            ScoringRequestOutput(
                b.request_id,
                ScoringOutput(similarity(a, b)),
                a.prompt_token_ids + b.prompt_token_ids,
                a.num_cached_tokens + b.num_cached_tokens,
            )
            for a, b in paired(outputs, len(left))
        ]

    def _embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        use_tqdm: UseTqdm,
    ) -> list[PoolingRequestOutput]:
        entries = [read_prompt(prompt, self.tokenizer) for prompt in split_prompts(prompts)]
        params_of_each = one_each("pooling_params", pooling_params, PoolingParams(), len(entries))
        requests = []
        for entry, given in zip(entries, params_of_each, strict=True):
            params = given.with_defaults(self._loaded.default_pooling)
            cut = truncated(entry, params, self.tokenizer, int(self._engine.config.max_model_len))
            requests.append(Embedding(self._runner.next_name(), cut, params))
        show = use_tqdm if use_tqdm is not None or len(entries) > 1 else False
        with progress_bar(len(requests), "embedding", "prompt", show) as bar:
            for _ in self._runner.run(requests, lambda index: requests[index].add_to(self._engine)):
                bar.update()
        return [request.output for request in requests]
