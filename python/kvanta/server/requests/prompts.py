"""Token ids from a request's prompt or messages. Runs on a worker thread: texts may be long and templates slow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvanta.errors import InputError, about
from kvanta.params.checks import one_line
from kvanta.params.pooling_params import PoolingParams
from kvanta.params.sampling_params import SamplingParams
from kvanta.server.http.errors import ApiError
from kvanta.server.http.hints import note
from kvanta.server.requests.chat_history import readable
from kvanta.server.requests.protocol import THINKING_SWITCHES, ChatFields
from kvanta.text.chat_messages import plain_messages
from kvanta.text.prompts import TokenPrompt, read_prompt, split_prompts, truncated
from kvanta.text.tokenizer import Tokenizer


def split(prompt: Any, name: str = "prompt") -> list[Any]:
    """The prompts of a request: a text, texts, token ids, or lists of them. `name`: of the field."""
    wrong = f"{name} must be a text, texts, token ids or lists of token ids, got "
    if not isinstance(prompt, (str, list)):
        raise InputError(wrong + one_line(prompt), name)
    prompts = split_prompts(prompt)
    if not prompts:
        raise InputError(f"{name} is an empty list", name)
    if not all(isinstance(entry, (str, list)) for entry in prompts):
        raise InputError(wrong + one_line(prompt), name)
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
        with about("prompt"):
            entry = read_prompt(prompt, tokenizer, add_special_tokens=add_special_tokens)
        entries.append(_check_tokens(truncated(entry, params, tokenizer, max_model_len), params, max_model_len))
    return entries


def chat_prompt(
    request: ChatFields, tokenizer: Tokenizer, max_model_len: int, params: SamplingParams, notes_unread: bool = False
) -> TokenPrompt:
    """The prompt that the chat template makes. Raises InputError or ApiError."""
    text = chat_text(request, tokenizer, notes_unread)
    if params.truncate_prompt_tokens is None:
        check_length(text, tokenizer, max_model_len)
    if not text:
        raise InputError("the model's chat template makes an empty prompt of these messages", "messages")
    with about("messages"):
        ids = tokenizer.encode(text, add_special_tokens=bool(request.add_special_tokens))
    return _check_tokens(truncated(TokenPrompt(text, ids), params, tokenizer, max_model_len), params, max_model_len)


def chat_text(request: ChatFields, tokenizer: Tokenizer, notes_unread: bool = False) -> str:
    """The conversation as the model reads it. `notes_unread`: see conversation.text_of."""
    with about("messages"):
        messages = plain_messages(readable(request.messages, notes_unread))
    variables = template_variables(request, tokenizer)
    reserved = sorted(variables.keys() & {"messages", "tools", "add_generation_prompt", "continue_final_message"})
    if reserved:
        message = f"chat_template_kwargs has {reserved[0]!r}, which is a field of the request itself"
        raise InputError(message, "chat_template_kwargs")
    tools = request.functions.for_template
    if tokenizer.writes_tools(tools):
        note("tools", "the model's chat template does not read it; the functions are written into the first message")
    continues = bool(request.continue_final_message)
    generates = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=generates,
        continue_final_message=continues,
        tools=tools,
        variables=variables,
    )


def template_variables(request: ChatFields, tokenizer: Tokenizer) -> dict[str, Any]:
    """Variables of the chat template. What it does not read of effort and thinking is a hint."""
    names = tokenizer.chat_template.names if tokenizer.chat_template is not None else frozenset()
    given = dict(request.chat_template_kwargs or {})
    for field in THINKING_SWITCHES:
        if isinstance(given.get(field), str) and _switched(given[field]) is not None:
            given[field] = _switched(given[field])
    extra = request.model_extra or {}
    reasoning = extra.get("reasoning")  # OpenRouter's
    reasoning = reasoning if isinstance(reasoning, Mapping) else {}
    for name in sorted(reasoning.keys() - {"effort", "enabled"}):
        note(f"reasoning.{name}", "the server decides")
    for field in THINKING_SWITCHES:
        value = _switched(extra.get(field, reasoning.get("enabled") if field == THINKING_SWITCHES[0] else None))
        variable = next((name for name in (field, *THINKING_SWITCHES) if name in names), None)
        if value is None:
            continue
        if variable is None:
            note(field, "the model's chat template does not read it")
        else:
            given.setdefault(variable, value)
    for field, effort in (
        ("reasoning_effort", request.reasoning_effort),
        ("reasoning.effort", reasoning.get("effort")),
    ):
        if isinstance(effort, str):
            _set_effort(given, field, effort, names)
    return {**tokenizer.template_defaults, **given}


def _switched(value: Any) -> bool | None:
    """Reasoning on or off, as {"type": "enabled"} and the text "true" have it, too; None: nothing is said."""
    kind = value.get("type") if isinstance(value, Mapping) else value
    if isinstance(kind, str):
        return {"enabled": True, "disabled": False, "true": True, "false": False}.get(kind.lower())
    return None if kind is None else bool(kind)


def _set_effort(variables: dict[str, Any], field: str, effort: str, names: Collection[str]) -> None:
    """Adds what the chat template reads. "none" turns reasoning off where it can be turned off. `field`: its name."""
    switches = [name for name in THINKING_SWITCHES if name in names]
    if "reasoning_effort" in names:
        variables.setdefault("reasoning_effort", effort)
    elif effort in ("none", "minimal") and switches:
        variables.setdefault(switches[0], False)
    elif effort != "medium":  # OpenAI's default
        note(field, "the model's chat template does not read it")


def check_length(text: str, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Refuses texts that are too long, without tokenizing: no token has more bytes than the longest one."""
    longest = max(1, tokenizer.longest_token)
    most = max_model_len * longest
    if len(text) > most:
        message = f"the prompt has {len(text)} characters, max_model_len = {max_model_len} tokens allows {most}"
        raise _too_long(message, -(-len(text) // longest), max_model_len)


def _check_tokens(entry: TokenPrompt, params: SamplingParams | PoolingParams, max_model_len: int) -> TokenPrompt:
    _check_count(len(entry.token_ids), params, max_model_len)
    return entry


def _check_count(tokens: int, params: SamplingParams | PoolingParams, max_model_len: int) -> None:
    longest = max_model_len - params.fewest_new_tokens
    if tokens > longest:
        reason = ": with one to generate" if params.fewest_new_tokens else ""
        message = f"the prompt has {tokens} tokens{reason}, max_model_len = {max_model_len} allows {longest}"
        raise _too_long(message, tokens, max_model_len)


def _too_long(message: str, tokens: int, max_model_len: int) -> ApiError:
    return ApiError(
        400,
        message,
        code="context_length_exceeded",
        param="prompt",
        prompt_tokens=tokens,
        max_model_len=max_model_len,
    )
