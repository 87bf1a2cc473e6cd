"""Token ids from a request's prompt or messages. Runs on a worker thread: texts may be long and templates slow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvanta.chat_template import check_messages
from kvanta.errors import InputError
from kvanta.pooling_params import PoolingParams
from kvanta.prompts import TokenPrompt, read_prompt, split_prompts, truncated
from kvanta.sampling_params import SamplingParams
from kvanta.server.errors import ApiError
from kvanta.server.protocol import ChatFields
from kvanta.tokenizer import Tokenizer
from kvanta.values import one_line


def split(prompt: Any, name: str = "prompt") -> list[Any]:
    """The prompts of a request: a text, texts, token ids, or lists of them. `name`: of the field."""
    wrong = f"{name} must be a text, texts, token ids or lists of token ids, got "
    if not isinstance(prompt, (str, list)):
        raise InputError(wrong + one_line(prompt))
    prompts = split_prompts(prompt)
    if not prompts:
        raise InputError(f"{name} is an empty list")
    if not all(isinstance(entry, (str, list)) for entry in prompts):
        raise InputError(wrong + one_line(prompt))
    return prompts


def encode(
    prompts: list[Any],
    tokenizer: Tokenizer,
    max_model_len: int,
    params: SamplingParams | PoolingParams,
    *,
    add_special_tokens: bool = True,
) -> list[TokenPrompt]:
    """One prompt each. Raises InputError or ApiError."""
    entries = []
    for prompt in prompts:
        if params.truncate_prompt_tokens is not None:
            pass  # any length
        elif isinstance(prompt, str):
            check_length(prompt, tokenizer, max_model_len)
        else:
            _check_count(len(prompt), params, max_model_len)  # before each of them is looked at
        entry = read_prompt(prompt, tokenizer, add_special_tokens=add_special_tokens)
        entries.append(_check_tokens(truncated(entry, params, tokenizer, max_model_len), params, max_model_len))
    return entries


def chat_prompt(request: ChatFields, tokenizer: Tokenizer, max_model_len: int, params: SamplingParams) -> TokenPrompt:
    """The prompt that the chat template makes. Raises InputError or ApiError."""
    text = chat_text(request, tokenizer)
    if params.truncate_prompt_tokens is None:
        check_length(text, tokenizer, max_model_len)
    if not text:
        raise InputError("the model's chat template makes an empty prompt of these messages")
    ids = tokenizer.encode(text, add_special_tokens=bool(request.add_special_tokens))
    return _check_tokens(truncated(TokenPrompt(text, ids), params, tokenizer, max_model_len), params, max_model_len)


def chat_text(request: ChatFields, tokenizer: Tokenizer) -> str:
    """The conversation as the model reads it."""
    check_messages(request.messages)
    messages = [_plain(index, message) for index, message in enumerate(request.messages)]
    variables = template_variables(request, tokenizer)
    reserved = sorted(variables.keys() & {"messages", "tools", "add_generation_prompt", "continue_final_message"})
    if reserved:
        raise InputError(f"chat_template_kwargs has {reserved[0]!r}, which is a field of the request itself")
    continues = bool(request.continue_final_message)
    generates = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=generates,
        continue_final_message=continues,
        tools=request.functions.for_template,
        variables=variables,
    )


def template_variables(request: ChatFields, tokenizer: Tokenizer) -> dict[str, Any]:
    """Variables of the chat template. Raises ApiError for an effort that the template does not read."""
    variables = {**tokenizer.template_defaults, **(request.chat_template_kwargs or {})}
    if request.reasoning_effort is not None:
        given = dict(request.chat_template_kwargs or {})
        _set_effort(given, request.reasoning_effort, tokenizer)
        variables.update(given)
    return variables


def _set_effort(variables: dict[str, Any], effort: str, tokenizer: Tokenizer) -> None:
    """Adds what the chat template reads. "medium" is OpenAI's default, and asks for nothing where it reads none."""
    names = tokenizer.chat_template.names if tokenizer.chat_template is not None else frozenset()
    switches = [name for name in ("enable_thinking", "thinking") if name in names]
    if "reasoning_effort" in names:
        variables.setdefault("reasoning_effort", effort)
    elif effort == "none" and switches:
        variables.setdefault(switches[0], False)
    elif effort != "medium":
        known = ", ".join(switches) or "no such variable"
        raise ApiError(
            400,
            f"reasoning_effort is {one_line(effort)}, and the model's chat template does not read it; for "
            f"chat_template_kwargs it has: {known}",
            param="reasoning_effort",
        )


def _plain(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: its content a text, the arguments of its tool calls objects."""
    plain = dict(message)
    plain["content"] = _content(index, message.get("content"))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and message["role"] == "assistant":  # under the names that templates have for it
        plain["reasoning_content"] = plain["reasoning"] = reasoning
        if not plain["content"]:
            plain.setdefault("thinking", reasoning)
    calls = message.get("tool_calls")
    if calls:
        plain["tool_calls"] = _tool_calls(index, calls)
    elif "tool_calls" in plain:
        del plain["tool_calls"]
    return plain


def _content(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(
            f"the content of chat message {index} must be a text or a list of parts, got {one_line(content)}"
        )
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = kind or one_line(part)
            raise InputError(
                f"chat message {index} has a part {what!r}: only {{'type': 'text', 'text': ...}} is supported"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(index: int, calls: Any) -> list[Any]:
    wrong = InputError(
        f"the tool_calls of chat message {index} must be a list of function calls, got {one_line(calls)}"
    )
    if not isinstance(calls, list):
        raise wrong
    plain = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise wrong
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise InputError(f"the arguments of a tool call of chat message {index} are not JSON") from None
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return plain


def check_length(text: str, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Without tokenizing: no token stands for more bytes than the longest one."""
    most = max_model_len * max(1, tokenizer.longest_token)
    if len(text) > most:
        raise _too_long(f"the prompt has {len(text)} characters")


def _check_tokens(entry: TokenPrompt, params: SamplingParams | PoolingParams, max_model_len: int) -> TokenPrompt:
    _check_count(len(entry.token_ids), params, max_model_len)
    return entry


def _check_count(tokens: int, params: SamplingParams | PoolingParams, max_model_len: int) -> None:
    longest = max_model_len - params.fewest_new_tokens
    if tokens > longest:
        reason = ": with one to generate" if params.fewest_new_tokens else ""
        raise _too_long(f"the prompt has {tokens} tokens{reason}, max_model_len = {max_model_len} allows {longest}")


def _too_long(message: str) -> ApiError:
    return ApiError(400, message, code="context_length_exceeded", param="prompt")
