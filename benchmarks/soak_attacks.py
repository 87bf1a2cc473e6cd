"""Requests of clients that mean harm: malformed ones, and proper ones that cost much to read or to answer."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, GENERATE = "/v1/messages", "/generate"


class Attack(NamedTuple):
    """A request, and the status of its answer when there is room for it."""

    path: str
    body: bytes
    status: int


def _list(count: int, value: str) -> str:
    return "[" + ",".join([value] * count) + "]"


def _names(count: int, value: str) -> str:
    return "{" + ",".join(f'"name{index}":{value}' for index in range(count)) + "}"


_LEAF = {"type": "object", "additionalProperties": False}
_WIDE = {**_LEAF, "properties": dict.fromkeys(map(str, range(4000)), _LEAF), "required": [*map(str, range(1, 4000))]}
_STRICT = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": _WIDE}}
_USER = {"role": "user", "content": "a"}
_SHORT = {"max_tokens": 2, "temperature": 0}
_CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
}
_CITY["additionalProperties"] = False
_TOOLS = [
    {"type": "function", "function": {"name": f"f{index}", "strict": True, "parameters": _CITY}} for index in range(64)
]
_FUNCTIONS = [{"type": "function", "name": f"f{index}", "parameters": _CITY} for index in range(2000)]
_SCORES = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}


def _malformed(path: str, text: str | bytes) -> Attack:
    return Attack(path, text if isinstance(text, bytes) else text.encode(), 400)


def _proper(path: str, **body: Any) -> Attack:
    return Attack(path, json.dumps(body).encode(), 200)


MALFORMED = (
    _malformed(COMPLETIONS, "{"),
    _malformed(COMPLETIONS, "[]"),
    _malformed(COMPLETIONS, '{"prompt": 5}'),
    _malformed(COMPLETIONS, '{"prompt": "a", "n": -1}'),
    _malformed(COMPLETIONS, '{"prompt": "a", "temperature": "hot"}'),
    _malformed(COMPLETIONS, '{"prompt": [' + "9" * 40 + "]}"),
    _malformed(COMPLETIONS, '{"prompt": "a", "response_format": {"type": "json_schema"}}'),
    _malformed(COMPLETIONS, b"\xff\xfe\x00"),
    # Costly to read.
    _malformed(COMPLETIONS, '{"prompt": "a", "stop": ' + _list(200_000, '"abcde"') + "}"),
    _malformed(COMPLETIONS, '{"prompt": ' + _list(300_000, "[]") + "}"),
    _malformed(COMPLETIONS, '{"prompt": ' + _list(50_000, "1.797693134862315712345e-308") + "}"),
    _malformed(COMPLETIONS, json.dumps({"prompt": "a", "response_format": _STRICT})),
    _malformed(COMPLETIONS, '{"prompt": "a", "logit_bias": ' + _names(200_000, "1") + "}"),
    _malformed(COMPLETIONS, '{"prompt": "a", "bad_words": ' + _list(10_000, '"a"') + "}"),
    _malformed(COMPLETIONS, '{"prompt": "' + "a" * 3_900_000),
    _malformed(COMPLETIONS, '{"prompt": "a", "x": ' + _list(780, "9" * 5000) + "}"),
    _malformed(CHAT, '{"messages": ' + _list(20_000, '{"role": 5}') + "}"),
    _malformed(RESPONSES, '{"input": ' + _list(60_000, '{"role": "user", "content": 5}') + "}"),
    _malformed(RESPONSES, '{"input": "a", "metadata": ' + _names(100_000, '"a"') + "}"),
    _malformed(MESSAGES, '{"max_tokens": 1, "messages": ' + _list(60_000, '{"role": "user", "content": 5}') + "}"),
    _malformed(GENERATE, '{"text": "a", "sampling_params": ' + _names(150_000, "1") + "}"),
    _malformed(GENERATE, '{"text": ' + _list(20_000, '"a"') + ', "sampling_params": [{}]}'),
)
COSTLY = (
    Attack(COMPLETIONS, b'{"prompt": "a", "max_tokens": 1, "x": ' + _list(1000, "9" * 600).encode() + b"}", 200),
    _proper(COMPLETIONS, prompt="a", n=8, logprobs=20, stop=["a" * 1000 + chr(256 + i) for i in range(64)], **_SHORT),
    _proper(COMPLETIONS, prompt=[5] * 200, prompt_logprobs=20, n=4, **_SHORT),
    _proper(COMPLETIONS, prompt="a", guided_choice=[f"word{index}" for index in range(2000)], **_SHORT),
    _proper(COMPLETIONS, prompt="a", bad_words=["ab " * 300 + str(index) for index in range(64)], **_SHORT),
    _proper(CHAT, messages=[_USER], tools=_TOOLS, tool_choice="required", **_SHORT),
    _proper(CHAT, messages=[_USER], tools=_TOOLS, stream=True, **_SHORT),
    _proper(RESPONSES, input="a", tools=_FUNCTIONS, tool_choice="none", max_output_tokens=2, stream=True),
    _proper(RESPONSES, input="a", text={"x": [[1]] * 40_000}, max_output_tokens=2, stream=True),
    _proper(MESSAGES, messages=[_USER], max_tokens=2, metadata={f"k{index}": "v" for index in range(50_000)}),
    _proper(GENERATE, input_ids=[[5] * 100] * 4, sampling_params={"max_new_tokens": 2}, **_SCORES),
    _proper(GENERATE, text="a", sampling_params={"max_new_tokens": 16, "n": 8}, stream=True, **_SCORES),
)
