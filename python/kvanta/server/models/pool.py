"""Models of a server: which are in memory, within one budget."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import h11
import orjson

from kvanta.errors import KvantaError, ResourceError
from kvanta.server.http.errors import ApiError
from kvanta.server.jobs.service import ANY_NAME
from kvanta.server.models.entry import ModelEntry
from kvanta.server.models.forward import get
from kvanta.server.models.memory import ModelMemory, model_memory
from kvanta.server.models.process import ModelProcess
from kvanta.terminal.tables import human_bytes

_log = logging.getLogger("kvanta.server")
State = Literal["unloaded", "loading", "loaded", "unloading"]
STATES: tuple[State, ...] = ("unloaded", "loading", "loaded", "unloading")
"""llama.cpp's names, and `unloading`: the model's last requests are answered, and further ones wait."""


class Model:
    """An entry, and what became of it."""

    def __init__(self, entry: ModelEntry) -> None:
        self.entry = entry
        self.name = entry.name
        self.state: State = "unloaded"
        self.process: ModelProcess | None = None
        self.memory = 0
        """Bytes of the budget that are taken; 0 while the model is not in memory."""
        self.users = 0
        """Requests that the process is answering."""
        self.waiting = 0
        """Requests that wait until the model is loaded."""
        self.last_used = 0.0
        """time.monotonic() at the beginning or the end of a request."""
        self.keep_alive = entry.keep_alive
        """That of the last request."""
        self.failure = ""
        """Reason why the last load failed, or the process was lost."""
        self.loads = self.failures = 0
        self.card: dict[str, Any] = {}
        """Its entry of /v1/models, once it has been loaded."""
        self.tag: dict[str, Any] = {}
        """Its entry of /api/tags, likewise."""
        self.loading: asyncio.Task[None] | None = None
        self.unloading: asyncio.Task[None] | None = None
        self.expiry: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """True without any request."""
        return not self.users and not self.waiting

    @property
    def expires_in(self) -> float:
        """Seconds until the model is unloaded, unless a request comes."""
        if self.expiry is None:
            return self.keep_alive
        return max(0.0, self.expiry.when() - asyncio.get_running_loop().time())


class ModelPool:
    """Loads models when they are used, and unloads those that were used least recently.

    Every method is called on the event loop's thread.
    """

    def __init__(
        self, entries: Sequence[ModelEntry], budget: int, common: Mapping[str, Any], default: str | None = None
    ) -> None:
        """`budget`: bytes of weights and caches in memory. `common`: options of every process. `default`: name of the
        model that takes every name.
        """
        self.models = {entry.name: Model(entry) for entry in entries}
        self.budget = budget
        self._common = common
        self._default = default
        self._folder = Path(tempfile.mkdtemp(prefix="kvanta-models-"))
        self._numbers = itertools.count()
        self._room = asyncio.Lock()
        """Held by the load that makes room: others get theirs in the order of their requests."""
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False

    @property
    def used(self) -> int:
        """Bytes of the budget that models take, from the beginning of a load to the end of the process."""
        return sum(model.memory for model in self.models.values())

    @asynccontextmanager
    async def using(self, model: Model, keep_alive: float | None = None) -> AsyncIterator[str]:
        """The socket of a loaded model, which stays in memory meanwhile. Raises ApiError if it cannot be loaded.

        `keep_alive`: seconds for which the model then stays in memory without a request; None: its entry's.
        """
        model.waiting += 1
        try:
            while model.state != "loaded":
                await asyncio.shield(self.load(model))
        except KvantaError as error:
            message = f"the model {model.name!r} could not be loaded: {error}"
            raise ApiError(500, message, code="model_load_failed", param="model") from None
        finally:
            model.waiting -= 1
            self._expire_later(model)
            self._changed()
        assert model.process is not None
        model.users += 1
        model.last_used = time.monotonic()
        model.keep_alive = model.entry.keep_alive if keep_alive is None else keep_alive
        if model.expiry is not None:
            model.expiry.cancel()
            model.expiry = None
        try:
            yield model.process.socket
        finally:
            model.users -= 1
            model.last_used = time.monotonic()
            self._changed()
            self._expire_later(model)

    def load(self, model: Model) -> asyncio.Task[None]:
        """Begins to load a model, unless it has begun. The task raises InputError or ResourceError."""
        if model.loading is None:
            if model.state == "unloaded":
                model.state = "loading"
            model.loading = self._task(self._load(model, model.unloading))
        return model.loading

    def unload(self, model: Model) -> asyncio.Task[None]:
        """Begins to unload a model: requests that it has finish first, and further ones wait to load it again."""
        if model.unloading is None:
            if model.state == "loaded":
                model.state = "unloading"
            model.unloading = self._task(self._unload(model))
        return model.unloading

    async def ask(self, process: ModelProcess, path: str) -> Any:
        """The JSON of a process's GET endpoint; None: it has failed. Raises OSError and h11.RemoteProtocolError."""
        keys = self._common.get("api_key") or ()
        headers = [(b"authorization", f"Bearer {key}".encode()) for key in keys[:1]]
        status, body = await get(process.socket, path, headers)
        return orjson.loads(body) if status == 200 else None

    def abort(self) -> None:
        """Makes every process end its requests with an error."""
        self._ending = True
        for model in self.models.values():
            if model.process is not None:
                model.process.abort()

    async def close(self) -> None:
        """Ends every process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        processes = [model.process for model in self.models.values() if model.process is not None]
        await asyncio.gather(*(process.stop() for process in processes))
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _load(self, model: Model, unloading: asyncio.Task[None] | None) -> None:
        """`unloading`: what has to end first."""
        begin = time.monotonic()
        try:
            async with self._room:
                if unloading is not None:
                    await asyncio.shield(unloading)
                model.state = "loading"
                entry = model.entry
                model.keep_alive = entry.keep_alive
                arguments = (entry.path, entry.options, entry.memory, self.budget)
                memory = await asyncio.to_thread(model_memory, *arguments)
                await self._make_room(model.name, memory.total)
                model.memory = memory.total
            await self._start(model, memory)
        except BaseException as error:
            model.state, model.memory, model.process = "unloaded", 0, None
            if isinstance(error, KvantaError):
                model.failure, model.failures = str(error), model.failures + 1
                _log.error("the model %s could not be loaded: %s", model.name, error)
            raise
        else:
            model.state, model.failure, model.loads = "loaded", "", model.loads + 1
            model.last_used = time.monotonic()
            taken = f"{human_bytes(self.used)} of {human_bytes(self.budget)}"
            _log.info("loaded %s in %.1f s; models take %s", model.name, model.last_used - begin, taken)
            self._expire_later(model)
        finally:
            model.loading = None
            self._changed()

    async def _start(self, model: Model, memory: ModelMemory) -> None:
        process = ModelProcess(model.name, self._folder, next(self._numbers))
        names = [model.name, ANY_NAME] if model.name == self._default else [model.name]
        options = {**self._common, **model.entry.options, "model": model.entry.path, "served_model_name": names}
        if memory.cache is not None:
            options["kv_cache_memory_bytes"] = memory.cache
        try:
            await process.start(options)
            await self._read_cards(model, process)
        except BaseException:
            await asyncio.shield(process.stop())
            raise
        model.process = process
        self._task(self._watch(model, process))

    async def _read_cards(self, model: Model, process: ModelProcess) -> None:
        """Reads how the model lists itself."""
        with suppress(OSError, h11.RemoteProtocolError):
            if cards := await self.ask(process, "/v1/models"):
                model.card = cards["data"][0]
            if tags := await self.ask(process, "/api/tags"):
                model.tag = tags["models"][0]

    async def _make_room(self, name: str, needed: int) -> None:
        """Unloads idle models, those first that were used least recently; where there are none, the first that ends its
        requests: a model that is never idle must not keep others out.
        """
        if needed > self.budget:
            raise ResourceError(
                f"weights and cache of {name!r} need {human_bytes(needed)}, and all models may take "
                f"{human_bytes(self.budget)} (--memory-budget)"
            )
        while self.used + needed > self.budget:
            change = self._change
            leaving = sum(model.memory for model in self.models.values() if model.state == "unloading")
            if self.used - leaving + needed > self.budget:
                # Requests that have waited for a model get it before it makes room for others.
                loaded = [model for model in self.models.values() if model.state == "loaded" and not model.waiting]
                victims = [model for model in loaded if model.is_idle] or loaded
                if victims:
                    self.unload(min(victims, key=lambda each: each.last_used))
                    continue
            await change.wait()

    async def _unload(self, model: Model) -> None:
        try:
            while model.loading is not None and model.state != "unloading":
                with suppress(KvantaError):
                    await asyncio.shield(model.loading)
            if model.process is None:
                return
            model.state = "unloading"
            while model.users:
                await self._change.wait()
            await model.process.stop()
            model.state, model.memory, model.process = "unloaded", 0, None
            _log.info("unloaded %s; models take %s", model.name, human_bytes(self.used))
        finally:
            model.unloading = None
            self._changed()

    async def _watch(self, model: Model, process: ModelProcess) -> None:
        """Notices a process that ends by itself; the next request starts another one."""
        await process.wait()
        if model.process is process and model.state == "loaded" and not self._ending:
            model.failure, model.failures = process.ending(), model.failures + 1
            _log.error("the model %s is lost: %s", model.name, model.failure)
            model.state = "unloading"
            model.unloading = self._task(self._unload(model))

    def _expire_later(self, model: Model) -> None:
        """Sets the time at which a model that is idle now is unloaded."""
        if model.expiry is not None:
            model.expiry.cancel()
            model.expiry = None
        if model.is_idle and model.state == "loaded" and model.keep_alive < math.inf:
            model.expiry = asyncio.get_running_loop().call_later(model.keep_alive, self._expire, model)

    def _expire(self, model: Model) -> None:
        model.expiry = None
        if model.is_idle and model.state == "loaded":
            self.unload(model)

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _task(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody else reads it
        return task
