#!/usr/bin/env python3
"""Writes the lists of request fields of other servers and clients, from their wheels; nothing of a wheel is run.

    pip download --no-deps vllm==0.33.0 sglang==0.5.23 openai==3.54.0 anthropic==2.12.0
    tools/field_lists.py *.whl > tools/data/request_fields.txt

Each line has a distribution, one of our endpoints (field_table.py has them), and the names of the fields.
"""

from __future__ import annotations

import argparse
import ast
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_POOLING = "vllm/entrypoints/pooling/base/protocol.py"
_SCORING = "vllm/entrypoints/pooling/scoring/protocol.py"

# By distribution and endpoint: sources and classes. Bases in the same source are read as well.
SOURCES: Mapping[str, Mapping[str, tuple[tuple[str, str], ...]]] = {
    "openai": {
        "chat": (("openai/types/chat/completion_create_params.py", "CompletionCreateParamsStreaming"),),
        "completions": (("openai/types/completion_create_params.py", "CompletionCreateParamsStreaming"),),
        "responses": (("openai/types/responses/response_create_params.py", "ResponseCreateParamsStreaming"),),
        "embeddings": (("openai/types/embedding_create_params.py", "EmbeddingCreateParams"),),
    },
    "anthropic": {
        "messages": (
            ("anthropic/types/message_create_params.py", "MessageCreateParamsStreaming"),
            ("anthropic/types/beta/message_create_params.py", "MessageCreateParamsStreaming"),
        ),
        "count_tokens": (
            ("anthropic/types/message_count_tokens_params.py", "MessageCountTokensParams"),
            ("anthropic/types/beta/message_count_tokens_params.py", "MessageCountTokensParams"),
        ),
    },
    "vllm": {
        "chat": (("vllm/entrypoints/openai/chat_completion/protocol.py", "ChatCompletionRequest"),),
        "completions": (("vllm/entrypoints/openai/completion/protocol.py", "CompletionRequest"),),
        "responses": (("vllm/entrypoints/openai/responses/protocol.py", "ResponsesRequest"),),
        "messages": (("vllm/entrypoints/anthropic/protocol.py", "AnthropicMessagesRequest"),),
        "count_tokens": (("vllm/entrypoints/anthropic/protocol.py", "AnthropicCountTokensRequest"),),
        "embeddings": (
            ("vllm/entrypoints/pooling/embed/protocol.py", "EmbeddingCompletionRequest"),
            ("vllm/entrypoints/pooling/embed/protocol.py", "EmbeddingChatRequest"),
            (_POOLING, "PoolingBasicRequestMixin"),
            (_POOLING, "CompletionRequestMixin"),
            (_POOLING, "ChatRequestMixin"),
            (_POOLING, "EmbedRequestMixin"),
        ),
        "rerank": (
            (_SCORING, "RerankRequest"),
            (_POOLING, "PoolingBasicRequestMixin"),
            (_POOLING, "ClassifyRequestMixin"),
        ),
        "score": (
            (_SCORING, "ScoreDataRequest"),
            (_SCORING, "ScoreQueriesDocumentsRequest"),
            (_SCORING, "ScoreQueriesItemsRequest"),
            (_SCORING, "ScoreTextRequest"),
            (_POOLING, "PoolingBasicRequestMixin"),
            (_POOLING, "ClassifyRequestMixin"),
        ),
        "SamplingParams": (("vllm/sampling_params.py", "SamplingParams"),),
    },
    "sglang": {
        "chat": (("sglang/srt/entrypoints/openai/protocol.py", "ChatCompletionRequest"),),
        "completions": (("sglang/srt/entrypoints/openai/protocol.py", "CompletionRequest"),),
        "responses": (("sglang/srt/entrypoints/openai/protocol.py", "ResponsesRequest"),),
        "messages": (("sglang/srt/entrypoints/anthropic/protocol.py", "AnthropicMessagesRequest"),),
        "embeddings": (("sglang/srt/entrypoints/openai/protocol.py", "EmbeddingRequest"),),
        "rerank": (("sglang/srt/entrypoints/openai/protocol.py", "V1RerankReqInput"),),
        "score": (("sglang/srt/entrypoints/openai/protocol.py", "ScoringRequest"),),
        "generate": (("sglang/srt/managers/io_struct.py", "GenerateReqInput"),),
        "sampling_params": (("sglang/srt/sampling/sampling_params.py", "SamplingParams"),),
    },
}
# Fields of SGLang's SamplingParams that it sets itself.
_INTERNAL = frozenset(
    ["ebnf_full_assistant", "is_normalized", "stop_regex_max_len", "stop_regex_strs", "stop_str_max_len", "stop_strs"]
)


def class_fields(tree: ast.Module, name: str) -> set[str]:
    """Annotated names of a class and of its bases in the same source."""
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found = set()
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found |= class_fields(tree, base.id)
    for each in classes[name].body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_":
            found.add(each.target.id)
    return found - _INTERNAL


def read_wheel(wheel: Path) -> Iterator[str]:
    """The lines of one distribution."""
    name = wheel.name.split("-")[0]
    if name not in SOURCES:
        raise SystemExit(f"error: {wheel.name} is none of {', '.join(SOURCES)}")
    with zipfile.ZipFile(wheel) as archive:
        for endpoint, sources in SOURCES[name].items():
            fields = set[str]().union(*(class_fields(ast.parse(archive.read(path)), kind) for path, kind in sources))
            yield f"{name} {endpoint}: {' '.join(sorted(fields))}"


def main() -> None:
    """Writes the lists to the standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="+")
    for wheel in parser.parse_args().wheels:
        sys.stdout.writelines(f"{line}\n" for line in read_wheel(wheel))


if __name__ == "__main__":
    main()
