"""A model's process: `kvanta serve` on a Unix domain socket. What it held is given back when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvanta.errors import ResourceError, reason_of

_SCRIPT = str(Path(__file__).with_name("model_process.py"))
_POLL_S = 0.02
_END_S = 10.0  # seconds for an idle process to end after SIGTERM
_MAX_LINE = 2**20
_ERROR = "kvanta: error: "


class ModelProcess:
    """One process. Every method is called on the event loop's thread."""

    def __init__(self, name: str, folder: Path, number: int) -> None:
        """`folder`: private to this user; files whose names begin with `number` are this process's."""
        self._name = name
        self.socket = str(folder / f"{number}.sock")
        self._config = folder / f"{number}.json"
        self._process: asyncio.subprocess.Process | None = None
        self._relay: asyncio.Task[None] | None = None
        self._error = ""

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._process.pid if self._process else 0

    async def start(self, options: Mapping[str, Any]) -> None:
        """Returns once requests are taken. `options`: those of `kvanta serve`, as --config has them.

        Raises ResourceError with the reason that the process gives.
        """
        self._config.touch(0o600)  # it may have keys
        self._config.write_text(json.dumps({**options, "uds": self.socket}), encoding="utf-8")
        words = (sys.executable, _SCRIPT, str(os.getpid()), "serve", "--config", str(self._config))
        try:  # in a session of its own: Ctrl-C reaches the parent alone, which decides
            self._process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                limit=_MAX_LINE,
                start_new_session=True,
            )
        except OSError as error:  # too many processes, or no memory
            raise ResourceError(f"its process cannot be started: {reason_of(error)}") from None
        self._relay = asyncio.create_task(self._pass_log_on(self._process))
        while not await self._listens():
            if self._process.returncode is not None:
                await self._relay
                raise ResourceError(self._error or self.ending())
            await asyncio.sleep(_POLL_S)
        self._config.unlink()  # it has been read, and would outlive a server that is killed

    async def wait(self) -> None:
        """Until the process has ended."""
        if self._process is not None:
            await self._process.wait()

    def ending(self) -> str:
        """The way in which the process has ended, for messages."""
        status = self._process.returncode if self._process else None
        if status is not None and status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        return f"its process exited with {status}"

    def abort(self) -> None:
        """Makes the process end its requests with an error, and then itself."""
        self._signal(signal.SIGINT)
        self._signal(signal.SIGTERM)

    async def stop(self) -> None:
        """Ends the process, whose requests have ended, and removes its files."""
        if self._process is not None:
            self._signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), _END_S)
            except TimeoutError:
                self._signal(signal.SIGKILL)
                await self._process.wait()
        if self._relay is not None:
            await self._relay
        for file in (self._config, Path(self.socket)):
            file.unlink(missing_ok=True)

    async def _listens(self) -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(self.socket)
        except OSError:  # it is not there, or refuses
            return False
        writer.close()
        return True

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _pass_log_on(self, process: asyncio.subprocess.Process) -> None:
        """Writes the lines of the process's log to ours, with the model's name."""
        assert process.stderr is not None
        while True:
            try:
                line = (await process.stderr.readline()).decode(errors="replace")
            except ValueError:  # longer than _MAX_LINE
                continue
            if not line:
                return
            if line.startswith(_ERROR):
                self._error = line.removeprefix(_ERROR).strip()
            with contextlib.suppress(OSError):  # a log that cannot be written must not end a model
                sys.stderr.write(f"[{self._name}] {line}")
                sys.stderr.flush()
