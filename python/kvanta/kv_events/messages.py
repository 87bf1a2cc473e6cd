"""Messages of KV events as vLLM 0.33 writes them: msgpack, batches as arrays, events as maps with their type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvanta import _core


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The contents of one message."""

    ts: float
    """Seconds since 1970."""
    events: list[Any]
    data_parallel_rank: int | None = None


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """A change of the cache; `type` in the map is the name of the class."""


class BlockStored(_Event):
    """Consecutive blocks of one path came into the cache."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """Extra keys of each block: the salt of a first block."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_Event):
    """Blocks left the cache."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    """The cache is empty."""


class EventEncoder:
    """Turns the engine's events into messages."""

    def __init__(self, *, block_size: int, medium: str, groups: Sequence[Mapping[str, Any]]) -> None:
        """`medium`: GPU or CPU, the memory that holds the pages. `groups`: as in the engine's stats."""
        self._block_size = block_size
        self._medium = medium
        self._specs = [_spec(str(group["visibility"])) for group in groups]
        self._encoder = msgspec.msgpack.Encoder()

    def batch(self, events: Iterable[_core.KvEvent], time: float, rank: int) -> bytes:
        """The payload of one message. `time`: seconds since 1970."""
        return self._encoder.encode(EventBatch(time, self._messages(events), rank))

    def _messages(self, events: Iterable[_core.KvEvent]) -> list[_Event]:
        """Blocks that continue each other are one message, as are those removed one after the other."""
        messages: list[_Event] = []
        for event in events:
            last = messages[-1] if messages else None
            if event.kind == _core.KvEventKind.CLEARED:
                messages.append(AllBlocksCleared())
            elif event.kind == _core.KvEventKind.REMOVED:
                if isinstance(last, BlockRemoved) and last.group_idx == event.group:
                    last.block_hashes.append(event.block_hash)
                else:
                    messages.append(BlockRemoved([event.block_hash], self._medium, event.group))
            elif (
                isinstance(last, BlockStored)
                and last.group_idx == event.group
                and last.block_hashes[-1] == event.parent_block_hash
            ):
                last.block_hashes.append(event.block_hash)
                last.token_ids += event.tokens
                if last.extra_keys is not None:
                    last.extra_keys.append(None)
            else:
                messages.append(self._stored(event))
        return messages

    def _stored(self, event: _core.KvEvent) -> BlockStored:
        kind, window = self._specs[event.group]
        return BlockStored(
            block_hashes=[event.block_hash],
            parent_block_hash=event.parent_block_hash,
            token_ids=event.tokens,
            block_size=self._block_size,
            lora_id=None,
            medium=self._medium,
            lora_name=None,
            extra_keys=[(event.cache_salt,)] if event.cache_salt else None,
            group_idx=event.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )


def _spec(visibility: str) -> tuple[str, int | None]:
    """VLLM's name of a group's kind, and its window in tokens."""
    name, _, span = visibility.partition("=")
    kinds = {"full": "full_attention", "chunked": "chunked_local_attention", "recurrent": "mamba"}
    return kinds.get(name, name), int(span) if name == "sliding_window" else None
