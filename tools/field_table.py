#!/usr/bin/env python3
"""Compares the fields of others' requests with those of our endpoints, and writes docs/fields.md.

    tools/field_table.py [--check]

Every field of tools/data/request_fields.txt (tools/field_lists.py makes it) must be known to the endpoint: honoured,
accepted because it means nothing here, or refused. The fates are those of the server's own declarations: the bodies of
python/kvanta/server, request_fields.py and SamplingParams. --check writes nothing and fails if a field is unknown or
the document is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from flag_table import KINDS, sections, write_or_check

from kvanta.options.foreign import Meaning
from kvanta.params.sampling_params import SamplingParams
from kvanta.server.anthropic.messages_request import CountTokensRequest, MessagesRequest
from kvanta.server.http.hints import Hint
from kvanta.server.llama_cpp import bodies as llama_cpp
from kvanta.server.llama_cpp.bodies import LlamaInfill
from kvanta.server.ollama import bodies as ollama
from kvanta.server.ollama.bodies import OllamaChat, OllamaGenerate
from kvanta.server.openai.responses_request import ResponsesRequest
from kvanta.server.requests import request_fields as known
from kvanta.server.requests.pooling_protocol import EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from kvanta.server.requests.protocol import ChatRequest, CompletionRequest
from kvanta.server.requests.request_fields import Refused
from kvanta.server.sglang.generate import SAMPLING_NAMES, SAMPLING_REFUSED, GenerateRequest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "fields.md"
LISTS = ROOT / "tools" / "data" / "request_fields.txt"
DISTRIBUTIONS = {
    "openai": "openai 3.54.0",
    "anthropic": "anthropic 2.12.0",
    "vllm": "vLLM 0.33.0",
    "sglang": "SGLang 0.5.23",
}
_HEAD = """\
# Fields of requests

The server knows every field of the requests of OpenAI's and Anthropic's clients, vLLM and SGLang, and those of
llama.cpp's and Ollama's clients that its endpoints name. Every field is
implemented ("honoured"), ignored ("accepted"), or rejected with a reason ("refused"). Values that request nothing
(null, false, the default) are always accepted. An honoured field may refuse single values:
[serve.md](serve.md#endpoints) describes the fields. Accepted and unknown ones that are given are named in the answer's
header `x-kvanta-ignored`, and once in the log.
`SamplingParams` is the class of Python. Written by `tools/field_table.py` from the types of the clients, the request
classes of the servers, and the declarations of ours.
"""


class Endpoint(NamedTuple):
    """A request body of Kvanta: its fields, its tables, and the endpoint that reads all other fields."""

    title: str
    declared: Collection[str]
    refused: Mapping[str, Refused] = {}
    ignored: Mapping[str, Hint] = {}
    names: Mapping[str, str] = {}
    """Other names -> those of `rest`."""
    rest: str = ""


def pooling_endpoint(title: str, body: type[PoolingRequest]) -> Endpoint:
    """An endpoint of hidden states: its own refusals before those of every request."""
    return Endpoint(title, body.model_fields.keys(), {**known.REFUSED, **body.refused}, known.IGNORED)


ENDPOINTS: Mapping[str, Endpoint] = {
    "chat": Endpoint(
        "/v1/chat/completions", ChatRequest.model_fields.keys() | known.READ, known.REFUSED, known.IGNORED
    ),
    "completions": Endpoint(
        "/v1/completions", CompletionRequest.model_fields.keys() | known.READ, known.REFUSED, known.IGNORED
    ),
    "responses": Endpoint(
        "/v1/responses",
        ResponsesRequest.model_fields.keys(),
        known.RESPONSES_REFUSED,
        known.RESPONSES_IGNORED,
        rest="chat",
    ),
    "messages": Endpoint(
        "/v1/messages", MessagesRequest.model_fields.keys(), known.MESSAGES_REFUSED, known.MESSAGES_IGNORED, rest="chat"
    ),
    "count_tokens": Endpoint(
        "/v1/messages/count_tokens",
        CountTokensRequest.model_fields.keys(),
        known.MESSAGES_REFUSED,
        known.MESSAGES_IGNORED,
        rest="chat",
    ),
    "embeddings": pooling_endpoint("/v1/embeddings", EmbeddingRequest),
    "rerank": pooling_endpoint("/rerank", RerankRequest),
    "score": pooling_endpoint("/score", ScoreRequest),
    "generate": Endpoint("/generate", GenerateRequest.model_fields.keys(), known.REFUSED, known.IGNORED),
    "sampling_params": Endpoint(
        "sampling_params of /generate", (), SAMPLING_REFUSED, names=SAMPLING_NAMES, rest="completions"
    ),
    "SamplingParams": Endpoint("SamplingParams", [field.name for field in fields(SamplingParams)]),
}
_SAMPLING = {field.name: field.metadata for field in fields(SamplingParams)}


def fate(endpoint: str, name: str) -> Meaning:
    """Fate of a field."""
    here = ENDPOINTS[endpoint]
    name = here.names.get(name, name)
    if name in here.declared:
        metadata: Mapping[str, Any] = _SAMPLING.get(name, {})
        if metadata.get("refused"):
            return Meaning("refused", metadata["refused"])
        return Meaning("accepted", metadata["accepted"]) if metadata.get("accepted") else Meaning("honoured", "")
    if name in here.refused:
        return Meaning("refused", here.refused[name].reason)
    if name in here.ignored:
        hint = here.ignored[name]
        return Meaning("accepted", f"{hint.reason} (since {hint.since})")
    return fate(here.rest, name) if here.rest else Meaning("unknown", "")


Table = Mapping[tuple[str, str], Mapping[str, Meaning]]
"""By distribution and endpoint: the fates of the fields."""


def fates() -> Table:
    """Every field of the lists."""
    table = {}
    for line in LISTS.read_text(encoding="utf-8").splitlines():
        source, _, names = line.partition(": ")
        distribution, endpoint = source.split()
        table[distribution, endpoint] = {name: fate(endpoint, name) for name in names.split()}
    return table


def others(table: Table) -> Mapping[str, Mapping[str, Meaning]]:
    """Fates of fields that no list has: of llama.cpp and Ollama, whose fields no Python package has, and of clients."""
    listed = {name for found in table.values() for name in found}
    of_clients = known.IGNORED.keys() - listed
    llamas = (LlamaInfill.model_fields.keys() - {"model"}) | llama_cpp.NAMES.keys() | {*llama_cpp.SAME, *llama_cpp.READ}
    ollamas = OllamaChat.model_fields.keys() | OllamaGenerate.model_fields.keys()
    options = {f"options.{name}" for name in ollama.OPTION_NAMES}
    hints = {f"options.{name}": hint for name, hint in ollama.OPTIONS_IGNORED.items()}
    refused = {f"options.{name}": each for name, each in ollama.OPTIONS_REFUSED.items()}
    return {
        "/completion and /infill of llama.cpp": _fates(
            llamas, {**llama_cpp.IGNORED, **llama_cpp.EDITORS_IGNORED}, llama_cpp.REFUSED, "at /completion: "
        ),
        "/api/chat and /api/generate of Ollama": _fates(
            (ollamas | options) - {"model", "keep_alive"}, {**ollama.IGNORED, **hints}, {**ollama.REFUSED, **refused}
        ),
        "Chats and completions of other clients": _fates((), {name: known.IGNORED[name] for name in of_clients}, {}),
    }


def _fates(
    honoured: Collection[str], ignored: Mapping[str, Hint], refused: Mapping[str, Refused], both: str = ""
) -> dict[str, Meaning]:
    """`both`: before the reason of refusing a field that is a hint at another endpoint."""
    found = dict.fromkeys(honoured, Meaning("honoured", ""))
    found |= {name: Meaning("accepted", f"{hint.reason} (since {hint.since})") for name, hint in ignored.items()}
    for name, each in refused.items():
        kind = found.get(name)
        reason = f"{both}{each.reason}; at /infill {kind.reason}" if kind else each.reason
        found[name] = Meaning("refused", reason)
    return found


def render(table: Table) -> str:
    """The document."""
    lines = [
        _HEAD,
        "| list | of | fields | honoured | accepted | refused | unknown |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for (distribution, endpoint), found in table.items():
        kinds = Counter(each.kind for each in found.values())
        numbers = " | ".join(str(kinds[kind]) for kind in KINDS)
        lines.append(f"| {DISTRIBUTIONS[distribution]} | {ENDPOINTS[endpoint].title} | {len(found)} | {numbers} |")
    for endpoint, described in ENDPOINTS.items():
        names = {name: each for (_, other), found in table.items() if other == endpoint for name, each in found.items()}
        lines += ["", f"## {described.title}", *sections(names, "###")]
    for title, fields_of in others(table).items():
        lines += ["", f"## {title}", *sections(fields_of, "###")]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes or checks the document; prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the document is out of date")
    check = parser.parse_args().check
    table = fates()
    unknown = [(key, name) for key, found in table.items() for name, each in found.items() if each.kind == "unknown"]
    for (distribution, endpoint), name in unknown:
        print(f"unknown: {name} of {DISTRIBUTIONS[distribution]}, {ENDPOINTS[endpoint].title}", file=sys.stderr)
    current = write_or_check(render(table), DOCUMENT, "field_table.py", check=check)
    return 0 if current and not unknown else 1


if __name__ == "__main__":
    raise SystemExit(main())
