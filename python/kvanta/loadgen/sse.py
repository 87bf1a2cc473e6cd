"""Server-sent events, as far as OpenAI's streams use them."""

from __future__ import annotations


class EventReader:
    """Takes bytes as they come and gives the data of each event that is complete (WHATWG HTML, section 9.2)."""

    def __init__(self, max_bytes: int = 1 << 22) -> None:
        """`max_bytes`: of one event; more raises ValueError."""
        self._max_bytes = max_bytes
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, received: bytes) -> list[str]:
        """Data of the events that `received` completes; raises ValueError on text that is not UTF-8, or too long."""
        *lines, self._rest = (self._rest + received).replace(b"\r\n", b"\n").split(b"\n")
        if len(self._rest) + self._size > self._max_bytes:
            raise ValueError(f"an event of more than {self._max_bytes:,} bytes")
        events = []
        for line in lines:
            if line in (b"", b"\r"):
                if self._data:
                    events.append(b"\n".join(self._data).decode())
                self._data, self._size = [], 0
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
                self._size += len(value)
        return events
