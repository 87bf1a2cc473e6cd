"""Prefix caches of the simulation: blocks of a trace, the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockCache:
    """Cache of at most `capacity` blocks. A block is found only if all blocks before it are found, too."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.reserved = 0
        """Blocks of running requests that are in no prefix: they lessen the room."""

    def match(self, blocks: Sequence[int]) -> int:
        """Leading blocks that are there."""
        held = self._blocks
        for count, block in enumerate(blocks):
            if block not in held:
                return count
        return len(blocks)

    def add(self, blocks: Sequence[int]) -> None:
        """Adds or renews a prompt's blocks. Earlier ones count as used later, so that a prefix goes from its end."""
        held = self._blocks
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        room = max(0, self._capacity - self.reserved)
        while len(held) > room:
            held.popitem(last=False)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)
