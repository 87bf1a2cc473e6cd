"""The answers of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from kvanta.server.answer import Answer
from kvanta.server.job import Delta, Job
from kvanta.server.logprobs import LogprobsWriter, prompt_logprobs
from kvanta.server.protocol import ChatRequest
from kvanta.tokenizer import Tokenizer


class ChatAnswer(Answer):
    """The assistant's messages."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, request_id: str, model: str, request: ChatRequest, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(request_id, model, request, job)
        as_ids = bool(request.return_tokens_as_token_ids)
        self._logprobs = LogprobsWriter(tokenizer, request.logprobs_wanted or 0, as_ids=as_ids)
        self._wants_logprobs = request.logprobs_wanted is not None
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        # With echo, the message that is continued stands at the beginning of its continuation.
        continued = request.messages[-1].get("content") if request.continue_final_message and request.echo else None
        self._begin = continued if isinstance(continued, str) else ""

    def _top_level(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._job.generations[0].output.prompt_token_ids} if self._token_ids else {}

    def _common(self, index: int, begin: int, end: int) -> dict[str, Any]:
        output = self._job.outputs[index]
        logprobs = None
        if self._wants_logprobs:
            logprobs = self._logprobs.chat(output.token_ids[begin:end], (output.logprobs or [])[begin:end])
        common: dict[str, Any] = {
            "index": index,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._token_ids:
            common["token_ids"] = output.token_ids[begin:end]
        return common

    def _choice(self, index: int) -> dict[str, Any]:
        output = self._job.outputs[index]
        message = {"role": "assistant", "content": self._begin + output.text}
        return {**self._common(index, 0, len(output.token_ids)), "message": message}

    def _opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": self._begin}
        return [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(len(self._job.outputs))
        ]

    def whole(self) -> dict[str, Any]:
        """With the prompt's log-probabilities where vLLM has them: beside the choices."""
        answer = super().whole()
        if self._wants_prompt_logprobs:
            answer["prompt_logprobs"] = prompt_logprobs(self._job.generations[0].output.prompt_logprobs)
        return answer

    def _piece(self, delta: Delta) -> dict[str, Any] | None:
        tells = delta.text or self._token_ids or self._wants_logprobs
        if not tells and not self._job.outputs[delta.choice].finished:
            return None
        content = {"content": delta.text} if delta.text else {}
        return {**self._common(delta.choice, delta.begin, delta.end), "delta": content}
