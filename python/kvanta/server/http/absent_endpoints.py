"""Endpoints of other servers that are not implemented, each with its replacement, for the message of a 404."""

from __future__ import annotations

from collections.abc import Mapping

_STORED = "nothing is stored (--store-responses); send the earlier items or messages with each request"
_TEXT_ALONE = "models generate text, without pictures or sound"
_OPENAI = "it is a service of OpenAI's platform, not of a model's server"
_LORA = "LoRA adapters are not supported; merge them into the weights"
_CHATS = "use /v1/chat/completions"

# The beginning of a path, up to a slash -> the reason; the longest match wins.
_REASONS: Mapping[str, str] = {
    # OpenAI's and Anthropic's.
    "/v1/responses": _STORED,
    "/v1/chat/completions": _STORED,
    "/v1/conversations": _STORED,
    "/v1/audio": _TEXT_ALONE,
    "/v1/images": _TEXT_ALONE,
    "/v1/videos": _TEXT_ALONE,
    "/v1/realtime": _TEXT_ALONE,
    **dict.fromkeys(
        ("/v1/assistants", "/v1/containers", "/v1/evals", "/v1/fine_tuning", "/v1/moderations", "/v1/organization"),
        _OPENAI,
    ),
    **dict.fromkeys(("/v1/threads", "/v1/vector_stores", "/v1/files", "/v1/uploads"), _OPENAI),
    "/v1/batches": "send the requests themselves; they run together",
    "/v1/messages/batches": "send the requests themselves; they run together",
    "/v1/complete": "use /v1/messages",
    # vLLM's and SGLang's.
    "/classify": "models have no classification heads; /score and /rerank compare embeddings",
    "/pooling": "use /v1/embeddings",
    "/encode": "use /v1/embeddings",
    "/invocations": "use the endpoint of the API that the request is of, such as /v1/chat/completions",
    "/inference/v1/generate": "use /v1/completions with token ids and return_token_ids",
    "/v1/completions/render": "use /tokenize",
    "/v1/chat/completions/render": "use /tokenize with messages",
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter"), _LORA),
    **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume"), "the server keeps its memory"),
    **dict.fromkeys(("/abort_request", "/abort_requests"), "close the request's connection"),
    **dict.fromkeys(("/reset_mm_cache", "/reset_encoder_cache"), _TEXT_ALONE),
    **dict.fromkeys(("/start_profile", "/stop_profile"), "kvanta bench engine --profile shows where time goes"),
    **dict.fromkeys(("/get_load", "/v1/loads"), "use /load, or /metrics"),
    # llama.cpp's.
    "/lora-adapters": _LORA,
    # Ollama's and TGI's.
    "/api": "Ollama's /api/chat, /api/generate and /api/embed are here",
    "/generate_stream": 'use /generate with "stream": true',
}


def reason_for(path: str) -> str:
    """The reason for its absence, or what to use instead; empty for a path of no known server."""
    while path:
        if path in _REASONS:
            return _REASONS[path]
        path = path.rpartition("/")[0]
    return ""
