"""Requests in the form in which agents of 2026 send them; the texts are our own."""

from __future__ import annotations

from typing import Any

READ_FILE: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "The file."},
        "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        "flags": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},
        "mode": {"anyOf": [{"const": "text", "type": "string"}, {"const": "bytes", "type": "string"}]},
    },
    "required": ["path"],
    "additionalProperties": False,
}
PATCH = {"type": "object", "properties": {"patch": {"type": "string", "format": "diff"}}, "required": ["patch"]}
Body = dict[str, Any]
Messages = list[dict[str, Any]]


def functions(*, strict: bool | None = None) -> list[Body]:
    """Two tools in the form of chats."""
    extra = {} if strict is None else {"strict": strict}
    return [
        {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": schema, **extra}}
        for name, schema in (("read_file", READ_FILE), ("apply_patch", PATCH))
    ]


def call(call_id: str, arguments: str) -> Body:
    """A message with a call, as chats keep it."""
    function = {"name": "read_file", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def chat_history(*, parts: bool, developer: bool) -> list[Messages]:
    """The turns of a session: a question, a result, an error after a broken call, an interruption, a summary.

    `parts`: contents are lists. `developer`: instead of the system role.
    """

    def text(words: str) -> Any:
        return [{"type": "text", "text": words}] if parts else words

    system = {"role": "developer" if developer else "system", "content": text("You help with code.")}
    first = [system, {"role": "user", "content": text("Read a.txt.")}]
    result = [
        *first,
        call("call_1", '{"path": "a.txt"}'),
        {"role": "tool", "tool_call_id": "call_1", "content": text("x")},
    ]
    said = [*result, {"role": "assistant", "content": text("It has an x."), "refusal": None}]
    broken = [
        *said,
        {"role": "user", "content": text("And b.txt?")},
        call("call_2", '{"path": "b.t'),
        {"role": "tool", "tool_call_id": "call_2", "content": "Error: the arguments are no JSON.", "name": "read_file"},
    ]
    stopped = [
        *broken,
        {"role": "assistant", "content": text("I will"), "reasoning_content": "Hm."},
        {"role": "user", "content": text("[Request interrupted by the user]")},
        {"role": "user", "content": text("Stop, and sum up.")},
    ]
    summary = [
        system,
        {"role": "user", "content": text("So far: a.txt has an x.")},
        {"role": "user", "content": text("Go on.")},
    ]
    return [first, result, broken, stopped, summary]


# Fields of each agent's chats, in addition to messages and tools.
CHAT_AGENTS: dict[str, Body] = {
    "aider": {"temperature": 0, "stream": True, "tools": None},
    "cline": {
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tool_choice": "auto",
        "parts": True,
    },
    "continue": {
        "max_tokens": 4096,
        "stream": True,
        "stop": ["<|im_end|>"],
        "parallel_tool_calls": False,
        "prediction": None,
    },
    "dify": {
        "user": "abc-123",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "top_p": 0.9,
    },
    "goose": {"temperature": 0.2, "max_tokens": 4096, "parallel_tool_calls": True, "parts": True},
    "home-assistant": {
        "max_completion_tokens": 3000,
        "top_p": 1.0,
        "temperature": 1.0,
        "user": "conversation",
        "strict": False,
    },
    "librechat": {
        "stream": True,
        "user": "u1",
        "include_reasoning": True,
        "presence_penalty": 0,
        "frequency_penalty": 0,
    },
    "n8n": {
        "n": 1,
        "stream": False,
        "frequency_penalty": 0,
        "logit_bias": {},
        "tool_choice": None,
        "response_format": None,
    },
    "open-webui": {
        "stream": True,
        "stream_options": {"include_usage": True},
        "features": {},
        "metadata": {"chat_id": "c"},
    },
    "opencode": {
        "max_tokens": 32000,
        "temperature": 0.55,
        "top_p": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "medium",
        "textVerbosity": "low",
        "promptCacheKey": "ses_1",
        "tool_choice": "auto",
    },
    "roo": {
        "temperature": 0,
        "stream": True,
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low"},
        "parts": True,
    },
    "zed": {
        "stream": True,
        "max_completion_tokens": 4096,
        "prompt_cache_key": "t",
        "parallel_tool_calls": False,
        "stop": [],
    },
}


def claude_code() -> list[Body]:
    """The turns of a session of /v1/messages."""
    cached = {"type": "ephemeral", "ttl": "1h"}
    common: Body = {
        "model": "claude-sonnet-4-5",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1"},
            {"type": "text", "text": "You help with code.", "cache_control": cached},
        ],
        "tools": [
            {"name": "Read", "description": "Reads.", "input_schema": READ_FILE, "eager_input_streaming": True},
            {"name": "Patch", "description": "Patches.", "input_schema": PATCH, "cache_control": cached},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    first: Messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Today is Sunday.</system-reminder>"},
                {"type": "text", "text": "Read a.txt.", "cache_control": cached},
            ],
        },
    ]
    use = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.txt"}}
    thought = {"type": "thinking", "thinking": "I read it.", "signature": "abc"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "x"}]}
    failed = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "<error>gone</error>", "is_error": True}
    turn: Messages = [*first, {"role": "assistant", "content": [thought, use]}]
    searched = [{"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "a"}}]
    turns: list[Messages] = [
        first,
        [*turn, {"role": "user", "content": [result]}],
        [*turn, {"role": "user", "content": [failed, {"type": "text", "text": "[Request interrupted by user]"}]}],
        [
            *turn,
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": [*searched, {"type": "text", "text": "So."}]},
            {"role": "user", "content": "Go on."},
        ],
        [{"role": "user", "content": "This session continues an earlier one: a.txt has an x."}],
    ]
    title = {
        "model": "claude-haiku-4-5",
        "max_tokens": 64,
        "temperature": 1,
        "system": "Name the topic.",
        "messages": [{"role": "user", "content": "Read a.txt."}],
        "output_config": {
            "format": {
                "type": "json_schema",
                "schema": {
                    "type": "object",
                    "properties": {"title": {"type": "string"}},
                    "required": ["title"],
                    "additionalProperties": False,
                },
            }
        },
    }
    quota = {"model": "claude-haiku-4-5", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
    return [quota, title, *({**common, "messages": messages} for messages in turns)]


def codex() -> list[Body]:
    """The turns of a session of /v1/responses."""
    common: Body = {
        "model": "gpt-5-codex",
        "instructions": "You help with code.",
        "tools": [
            {
                "type": "function",
                "name": "shell",
                "description": "Runs.",
                "strict": False,
                "parameters": {
                    "type": "object",
                    "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                    "required": ["command"],
                    "additionalProperties": False,
                },
            },
            {
                "type": "custom",
                "name": "apply_patch",
                "description": "Edits.",
                "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" /.+/'},
            },
            {"type": "web_search", "external_web_access": False},
            {"type": "local_shell"},
            {
                "type": "namespace",
                "name": "mcp__files",
                "tools": [{"type": "function", "name": "list", "parameters": READ_FILE}],
            },
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "service_tier": "priority",
        "prompt_cache_key": "0199-session",
        "text": {"verbosity": "low"},
        "client_metadata": {"x": "y"},
    }
    first: Messages = [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>read</permissions>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Read a.txt."}]},
    ]
    shell = {
        "type": "function_call",
        "call_id": "call_1",
        "name": "shell",
        "arguments": '{"command": ["cat", "a.txt"]}',
    }
    thought: Body = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"}
    done = {
        "type": "function_call_output",
        "call_id": "call_1",
        "output": '{"output": "x", "metadata": {"exit_code": 0}}',
    }
    broken = {**shell, "call_id": "call_2", "arguments": '{"command": ["ca'}
    failed = {"type": "function_call_output", "call_id": "call_2", "output": "failed to parse arguments"}
    patch = {"type": "custom_tool_call", "call_id": "call_3", "name": "apply_patch", "input": "*** Begin Patch"}
    patched = {"type": "custom_tool_call_output", "call_id": "call_3", "output": "ok"}
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]}
    told = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]}
    searched = {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "a"}}
    turns: list[Messages] = [
        first,
        [*first, thought, shell, done],
        [*first, shell, done, broken, failed],
        [*first, shell, done, patch, patched, told, searched, asked],
        [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "Summary: a.txt has an x."}],
            },
            asked,
        ],
    ]
    return [{**common, "input": items} for items in turns]
