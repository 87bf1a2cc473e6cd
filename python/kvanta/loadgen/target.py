"""A server under test: what it serves and what it takes, found out before the load."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from kvanta.errors import InputError, ResourceError
from kvanta.loadgen.client import fetch_json, stream_answer
from kvanta.loadgen.prompts import WORDS, PromptMaker, words_for
from kvanta.loadgen.records import LoadError, RequestRecord
from kvanta.loadgen.runner import Clock
from kvanta.loadgen.workload import PlannedRequest

APIS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PROMPT_KINDS = ("auto", "ids", "text")
# Fields that fix an answer's length; a server that supports neither may refuse them.
_EXACT = {"ignore_eos": True}
_PROBE_WORDS = 64


def base_of(url: str) -> str:
    """The URL without /v1 and a slash at the end; raises InputError."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise InputError(f"{url!r} is no address of a server; an example: http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass
class Target:
    """Destination and form of the requests."""

    base: str
    model: str
    api: str = "completions"
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every request's body."""
    exact: bool = True
    """True if answers have exactly the requested length."""
    max_model_len: int | None = None
    cache_dtype: str | None = None
    ids: tuple[int, ...] = ()
    """Token ids to make prompts of; () where prompts are words."""
    tokens_per_word: float = 1.0
    overhead: float = 0.0
    """Tokens that the server adds to the words, such as those of a chat template."""

    @property
    def prompt_kind(self) -> str:
        """One of PROMPT_KINDS."""
        return "ids" if self.ids else "text"

    def maker(self, seed: int) -> PromptMaker:
        """Maker of this server's prompts."""
        return PromptMaker(self.ids or WORDS, seed)

    def body(self, prompt: Sequence[int] | str, output_tokens: int) -> dict[str, Any]:
        """The body of one request."""
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        if self.api == "completions":
            asked = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        return {
            "model": self.model,
            **asked,
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(_EXACT if self.exact else {}),
            **self.extra,
        }

    def prompt(self, maker: PromptMaker, request: PlannedRequest, run: int) -> list[int] | str:
        """The prompt of a planned request: of exactly the planned length with ids, of about that length with words."""
        pieces = maker.pieces(request, run)
        if self.ids:
            return pieces
        count = words_for(request.input_tokens, self.tokens_per_word, self.overhead)
        repeated = pieces * (count // len(pieces) + 1)  # less than one token per word
        return " ".join(repeated[:count])

    async def send(
        self, session: aiohttp.ClientSession, prompt: Sequence[int] | str, record: RequestRecord, clock: Clock
    ) -> None:
        """Sends one request and reads its answer. Raises LoadError."""
        await stream_answer(session, self.base + APIS[self.api], self.body(prompt, record.wanted_tokens), record, clock)


async def find_target(
    session: aiohttp.ClientSession,
    url: str,
    *,
    model: str | None = None,
    api: str = "completions",
    prompts: str = "auto",
    extra: Mapping[str, Any] | None = None,
    ids: Sequence[int] = (),
) -> Target:
    """Asks the server for its model, and with single short requests for what it takes.

    `ids`: token ids to make prompts of; otherwise they come from the server's /tokenize. Raises ResourceError if
    the server does not answer, InputError if it does not support what is requested.
    """
    base = base_of(url)
    if api == "chat" and prompts == "ids":
        raise InputError("a chat takes no token ids; give --prompts text or --api completions")
    try:
        name, card = await _served_model(session, base, model)
    except LoadError as error:
        raise ResourceError(f"{base}/v1/models: {error.kind}: {error.detail}") from None
    target = Target(base, name, api, dict(extra or {}))
    longest, cache = card.get("max_model_len"), card.get("kv_cache_dtype")
    target.max_model_len = longest if type(longest) is int and longest > 0 else None
    target.cache_dtype = cache if isinstance(cache, str) else None
    if api == "completions" and prompts != "text":
        target.ids = tuple(ids) or await _some_ids(session, target)
        if not target.ids and prompts == "ids":
            raise InputError(f"{base} has no /tokenize; give the model's tokenizer with --tokenizer, or --prompts text")
    await _agree(session, target, prompts)
    return target


async def _served_model(session: aiohttp.ClientSession, base: str, requested: str | None) -> tuple[str, dict[str, Any]]:
    """Its name, and what the server's list says of it."""
    answer = await fetch_json(session, "GET", f"{base}/v1/models")
    listed = answer.get("data") if isinstance(answer, dict) else None
    cards = (
        [each for each in listed if isinstance(each, dict) and isinstance(each.get("id"), str)]
        if isinstance(listed, list)
        else []
    )
    if requested is None and not cards:
        raise LoadError("bad_response", "no model in the list")
    names = [card["id"] for card in cards]
    if requested is not None and names and requested not in names:
        raise InputError(f"the server has no model {requested!r}; it has {', '.join(names[:10])}")
    card: dict[str, Any] = next((card for card in cards if card["id"] == requested), cards[0] if cards else {})
    return requested or names[0], card


async def _some_ids(session: aiohttp.ClientSession, target: Target) -> tuple[int, ...]:
    """Token ids of common words, without special ones; () where the server cannot tokenize."""
    body = {"model": target.model, "prompt": " " + " ".join(WORDS), "add_special_tokens": False}
    try:
        answer = await fetch_json(session, "POST", f"{target.base}/tokenize", body)
    except LoadError:
        return ()
    found = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(found, list) or not all(type(each) is int and each >= 0 for each in found):
        return ()
    unique = tuple(sorted(set(found)))
    return unique if len(unique) > 1 else ()


async def _agree(session: aiohttp.ClientSession, target: Target, prompts: str) -> None:
    """Finds the form that the server takes: first exact, then without its extensions, then words for ids."""
    all_ids = target.ids
    kinds = [all_ids, ()] if all_ids and prompts == "auto" else [all_ids]
    complaint: LoadError | None = None
    for ids in kinds:
        for exact in (True, False):
            target.ids, target.exact = ids, exact
            try:
                await _probe(session, target)
            except LoadError as error:
                complaint = complaint or error
                if re.fullmatch("http_4(00|22)", error.kind) is None:
                    break  # not of the request's form: a key that is wrong stays wrong
            else:
                return
    assert complaint is not None
    said = f"{target.base}{APIS[target.api]}: {complaint.kind}: {complaint.detail}"
    raise (InputError if complaint.kind.startswith("http_4") else ResourceError)(said)


async def _probe(session: aiohttp.ClientSession, target: Target) -> None:
    """One short request. For words: how many tokens they are."""
    if target.ids:
        record = await _try(session, target, [target.ids[i % len(target.ids)] for i in range(_PROBE_WORDS)])
        if record.input_tokens not in (0, _PROBE_WORDS):  # 0: it counts nothing
            raise LoadError("http_400", f"{_PROBE_WORDS} token ids are {record.input_tokens} tokens to the server")
        return
    few, many = _PROBE_WORDS // 4, _PROBE_WORDS
    small = await _try(session, target, " ".join(WORDS[:few]))
    large = await _try(session, target, " ".join(WORDS[:many]))
    if large.input_tokens > small.input_tokens > 0:
        target.tokens_per_word = (large.input_tokens - small.input_tokens) / (many - few)
        target.overhead = max(0.0, small.input_tokens - few * target.tokens_per_word)


async def _try(session: aiohttp.ClientSession, target: Target, prompt: Sequence[int] | str) -> RequestRecord:
    record = RequestRecord(0, 0.0, 0, wanted_tokens=2)
    await target.send(session, prompt, record, lambda: 0.0)
    return record
