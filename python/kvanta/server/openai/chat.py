"""The answers of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from kvanta.parsers.answer import AnswerShape
from kvanta.parsers.tool_calls import rest_of, whole_of
from kvanta.server.jobs.generation_job import Delta, GenerationJob
from kvanta.server.jobs.response import ChoicesResponse
from kvanta.server.openai.logprobs import LogprobsWriter, prompt_logprobs
from kvanta.server.requests.chat_history import readable
from kvanta.server.requests.custom_tools import CustomCalls
from kvanta.server.requests.protocol import ChatRequest
from kvanta.text.chat_messages import plain_messages
from kvanta.text.tokenizer import Tokenizer

REASONING_FIELDS = ("reasoning_content", "reasoning")
"""The older name and the newer one: clients know either of them."""


class ChatResponse(ChoicesResponse):
    """The assistant's messages."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(
        self,
        request_id: str,
        model: str,
        request: ChatRequest,
        job: GenerationJob,
        tokenizer: Tokenizer,
        shape: AnswerShape,
    ) -> None:
        """`shape` takes the texts apart."""
        super().__init__(request_id, model, request, job)
        self._named = request.functions.named
        prompt = job.generations[0].output.prompt or ""
        self._readers = [shape.reader(prompt) for _ in job.outputs]
        self._calls = [CustomCalls(request.custom_tools) for _ in job.outputs]
        self._counts = [count for _ in job.outputs if (count := shape.count(prompt)) is not None]
        self._has_reasoning = bool(self._counts) and request.include_reasoning is not False
        as_ids = bool(request.return_tokens_as_token_ids)
        most = None if request.logprob_token_ids else request.requested_logprobs or 0
        self._logprobs = LogprobsWriter(tokenizer, most, as_ids=as_ids)
        self._wants_logprobs = request.requested_logprobs is not None
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        # With echo, the message that is continued stands at the beginning of its continuation.
        echoes = request.continue_final_message and request.echo
        self._begin = str(plain_messages(readable(request.messages[-1:], True))[-1]["content"]) if echoes else ""

    def _top_level(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._job.generations[0].output.prompt_token_ids} if self._token_ids else {}

    def _common(self, delta: Delta) -> dict[str, Any]:
        output, begin, end = self._job.outputs[delta.choice], delta.begin, delta.end
        logprobs = None
        if self._wants_logprobs:
            logprobs = self._logprobs.chat(output.token_ids[begin:end], (output.logprobs or [])[begin:end])
        common: dict[str, Any] = {
            "index": delta.choice,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._token_ids:
            common["token_ids"] = output.token_ids[begin:end]
        return common

    def _choice(self, index: int) -> dict[str, Any]:
        delta = self._job.whole(index)
        found = whole_of(self._readers[index], delta.text, ended=delta.ended)
        content = self._begin + found.content
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._has_reasoning:
            message |= dict.fromkeys(REASONING_FIELDS, found.reasoning or None)
        if found.calls or (self._counts and not content):
            message["content"] = content if content.strip() else None
        if found.calls:
            calls = self._calls[index].take(found.calls, finished=True)
            message["tool_calls"] = [{key: call[key] for key in call if key != "index"} for call in calls]
        return {**self._common(delta), **(self._ending(delta) if found.calls else {}), "message": message}

    def _ending(self, delta: Delta) -> dict[str, Any]:
        """Finish reason as OpenAI's: an answer of calls ends with them, unless the client chose the function."""
        ends = delta.finish_reason == "stop"
        calls = ends and self._readers[delta.choice].calls > 0 and not self._named
        return {"finish_reason": "tool_calls"} if calls else {}

    def usage(self) -> dict[str, Any]:
        """Usage so far, with the tokens of reasoning if the server separates it."""
        usage = super().usage()
        if self._counts:
            outputs = zip(self._counts, self._job.outputs, strict=True)
            tokens = sum(count.update(output.token_ids) for count, output in outputs)
            usage.setdefault("completion_tokens_details", {})["reasoning_tokens"] = tokens
        return usage

    def _opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": self._begin}
        return [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(len(self._job.outputs))
        ]

    def whole(self) -> dict[str, Any]:
        """The whole answer, with the prompt's log-probabilities next to the choices, as in vLLM."""
        return {**super().whole(), **self._of_prompt()}

    def _of_prompt(self) -> dict[str, Any]:
        if not self._wants_prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._job.generations[0].output.prompt_logprobs)}

    def _beside(self, delta: Delta) -> dict[str, Any]:
        return self._of_prompt() if self._is_first(delta) else {}

    def _is_first(self, delta: Delta) -> bool:
        """True where the log-probabilities of the prompt have come, with the first text's first token."""
        return delta.choice == 0 and delta.begin == 0

    def _pieces(self, delta: Delta) -> list[dict[str, Any]]:
        finished = delta.finished
        reader = self._readers[delta.choice]
        found = rest_of(reader, delta.text) if finished else reader.take(delta.text)
        if not self._has_reasoning:
            found.reasoning = ""
        found.calls = self._calls[delta.choice].take(found.calls, finished=finished)
        tells = self._token_ids or self._wants_logprobs or (self._wants_prompt_logprobs and self._is_first(delta))
        if not (found or tells or finished):
            return []
        new: dict[str, Any] = {"content": found.content} if found.content else {}
        if found.reasoning:
            new |= dict.fromkeys(REASONING_FIELDS, found.reasoning)
        if found.calls:
            new["tool_calls"] = found.calls
        choice = {**self._common(delta), **(self._ending(delta) if finished else {}), "delta": new}
        if not (finished and found.calls):
            return [choice]
        # As OpenAI's: the openai client reports a call as done in a chunk after the last one with its arguments.
        end = {key: choice[key] for key in ("index", "finish_reason", "stop_reason")}
        return [{**choice, "finish_reason": None, "stop_reason": None}, {**end, "logprobs": None, "delta": {}}]
