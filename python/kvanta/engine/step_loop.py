"""Steps of an engine, shared by overlapping calls of one program."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from kvanta import _core


class EngineRequest(Protocol):
    """A prompt in the engine."""

    @property
    def names(self) -> Iterable[str]:
        """The engine's requests."""

    def finished(self, name: str) -> bool:
        """True when one of them has no more to come."""

    def take(self, engine_output: _core.EngineOutput) -> str:
        """Adds one step's output; returns the text that is now certain."""


AnyRequest = TypeVar("AnyRequest", bound=EngineRequest)


class EngineRunner:
    """Every call may step the engine, and each step serves the requests of all calls."""

    def __init__(self, engine: _core.Engine, pending_warnings: list[str]) -> None:
        """`pending_warnings`: the engine's, which the next step issues."""
        self._engine = engine
        self._warnings = pending_warnings
        # Reentrant: a forgotten stream may be collected, and so closed, while this thread holds the lock.
        self.lock = threading.RLock()
        self._inboxes: dict[str, deque[_core.EngineOutput]] = {}  # by request id: outputs for open calls
        self._names = itertools.count()

    def next_name(self) -> str:
        """An id that no request has had."""
        return str(next(self._names))

    def run(self, requests: Sequence[AnyRequest], add: Callable[[int], None]) -> Iterator[tuple[AnyRequest, str]]:
        """`add` queues a request, by its index. Yields each request's new text until all are finished.

        The lock is held for single steps only, never while the caller handles an output.
        """
        inbox: deque[_core.EngineOutput] = deque()
        owners: dict[str, AnyRequest] = {}
        try:
            with self.lock:
                for index, request in enumerate(requests):
                    for name in request.names:
                        owners[name] = request
                        self._inboxes[name] = inbox
                    add(index)
            while owners:
                self._wait_for_output(inbox)
                engine_output = inbox.popleft()
                if engine_output.id not in owners:  # the final output of a request that a stop string has ended
                    continue
                request = owners[engine_output.id]
                text = request.take(engine_output)
                if request.finished(engine_output.id):
                    del owners[engine_output.id]
                    self._leave(
                        [engine_output.id], abort=engine_output.finish == _core.FinishReason.NONE
                    )  # a stop string ended it
                yield request, text
        finally:
            self._leave(list(owners), abort=True)  # an error, Ctrl-C, or a caller that has left the loop

    def warn(self, stacklevel: int) -> None:
        """Issues the engine's warnings on the caller's thread."""
        while self._warnings:
            warnings.warn(self._warnings.pop(0), stacklevel=stacklevel)

    def _wait_for_output(self, inbox: deque[_core.EngineOutput]) -> None:
        """Steps until `inbox` is not empty; steps of other calls may fill it as well."""
        while not inbox:
            with self.lock:
                if not inbox and not self._step():
                    raise RuntimeError("the engine has nothing to do, but requests are not finished")

    def _step(self) -> bool:
        """Runs one step of the engine and distributes its outputs; False when there was nothing to do."""
        step = self._engine.step()
        for engine_output in step or ():
            if engine_output.id in self._inboxes:
                self._inboxes[engine_output.id].append(engine_output)
        self.warn(stacklevel=7)
        return step is not None

    def _leave(self, names: list[str], *, abort: bool) -> None:
        """Removes requests; the last call drains the engine, so that it is idle afterwards."""
        with self.lock:
            for name in names:
                self._inboxes.pop(name, None)
                if abort:
                    self._engine.abort(name)
            while not self._inboxes and self._step():
                pass
