"""The answers of /v1/completions."""

from __future__ import annotations

from typing import Any

from kvanta.outputs import TokenLogprobs
from kvanta.server.jobs.generation_job import Delta, GenerationJob
from kvanta.server.jobs.response import ChoicesResponse
from kvanta.server.openai.logprobs import LogprobsWriter, TextOffsets, prompt_logprobs
from kvanta.server.requests.protocol import CompletionRequest
from kvanta.text.tokenizer import Tokenizer


class CompletionResponse(ChoicesResponse):
    """Texts that follow prompts; with `echo`, after the prompt itself."""

    whole_object = chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(
        self, request_id: str, model: str, request: CompletionRequest, job: GenerationJob, tokenizer: Tokenizer
    ) -> None:
        super().__init__(request_id, model, request, job)
        self._tokenizer = tokenizer
        self._echo = bool(request.echo)
        self._prompt_only = self._echo and request.max_tokens == 0
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        self._logprobs = request.logprobs
        as_ids = bool(request.return_tokens_as_token_ids)
        most = None if request.logprob_token_ids else request.logprobs or 0
        self._writers = [LogprobsWriter(tokenizer, most, as_ids=as_ids) for _ in job.outputs]
        skips = job.generations[0].params.skip_special_tokens
        self._offsets = [TextOffsets(tokenizer, skip_special_tokens=skips) for _ in job.outputs]

    def _completion_tokens(self) -> int:
        return 0 if self._prompt_only else super()._completion_tokens()

    def _prompt(self, index: int) -> Any:
        """The output of the prompt that a choice belongs to."""
        texts = len(self._job.outputs) // len(self._job.generations)
        return self._job.generations[index // texts].output

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompt(index)
        return prompt.prompt if prompt.prompt is not None else self._tokenizer.decode(prompt.prompt_token_ids)

    def _fields(self, delta: Delta) -> dict[str, Any]:
        """A choice with new content; the first has what belongs to the prompt."""
        index, text, begin, end = delta.choice, delta.text, delta.begin, delta.end
        with_prompt = begin == 0
        output, prompt = self._job.outputs[index], self._prompt(index)
        if self._prompt_only:
            text, end = "", begin
        tokens = output.token_ids[begin:end]
        echoes = with_prompt and self._echo
        echoed = self._prompt_text(index) if echoes else ""
        text = echoed + text
        logprobs = None
        if self._logprobs is not None:
            entries: list[TokenLogprobs | None] = [*(output.logprobs or [])[begin:end]]
            of_prompt = list(prompt.prompt_token_ids) if echoes else []
            offsets = []
            if echoes:
                entries = [*(prompt.prompt_logprobs or [None] * len(of_prompt)), *entries]
                offsets = self._offsets[index].of_prompt(of_prompt, echoed, prompt.prompt)
            offsets += self._offsets[index].of_answer(tokens, prompt.prompt_token_ids)
            logprobs = self._writers[index].completions([*of_prompt, *tokens], entries, offsets)
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if with_prompt and self._wants_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(prompt.prompt_logprobs)
        if self._token_ids:
            choice["token_ids"] = tokens
            if with_prompt:
                choice["prompt_token_ids"] = prompt.prompt_token_ids
        return choice

    def _choice(self, index: int) -> dict[str, Any]:
        return self._fields(self._job.whole(index))

    def _opening(self) -> list[dict[str, Any]]:
        return []

    def _pieces(self, delta: Delta) -> list[dict[str, Any]]:
        first = delta.begin == 0
        tells = delta.text or self._token_ids or self._logprobs is not None or (first and self._echo)
        if not tells and not delta.finished:
            return []
        return [self._fields(delta)]
