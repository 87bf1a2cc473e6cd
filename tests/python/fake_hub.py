"""A model hub on this machine: repositories made of folders, for huggingface_hub with HF_ENDPOINT."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_fake"


@dataclass
class FakeHub:
    """Serves repositories while it runs."""

    url: str
    home: Path
    """Folder for what is downloaded."""
    repositories: dict[str, Path] = field(default_factory=dict)
    """Name -> folder of its files."""
    private: set[str] = field(default_factory=set)
    """Repositories that need TOKEN."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request."""

    def environment(self) -> dict[str, str]:
        """Variables of processes that are to use it. The package reads them when it is imported."""
        quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "0"}
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(self.home), "KVANTA_HOME": str(self.home / "kvanta"), **quiet}

    def add(self, name: str, files: dict[str, Path]) -> None:
        """A repository of links to files."""
        folder = self.home / "served" / name
        folder.mkdir(parents=True)
        for file, target in files.items():
            (folder / file).symlink_to(target)
        self.repositories[name] = folder

    def downloads(self) -> list[str]:
        """Files whose content was requested."""
        return [path.rsplit("/", 1)[1] for method, path in self.requests if method == "GET" and "/resolve/" in path]

    def files_of(self, name: str) -> list[Path]:
        return sorted(path for path in self.repositories[name].iterdir() if path.is_file())

    def commit_of(self, name: str) -> str:
        """The repository's only commit."""
        return hashlib.sha1("\n".join(path.name for path in self.files_of(name)).encode()).hexdigest()

    def is_revision(self, name: str, revision: str) -> bool:
        return revision in ("main", self.commit_of(name))

    def info(self, name: str) -> dict[str, Any]:
        """The model, as /api/models/NAME describes it."""
        siblings = [{"rfilename": path.name} for path in self.files_of(name)]
        return {"id": name, "modelId": name, "sha": self.commit_of(name), "private": False, "siblings": siblings}

    def tree(self, name: str) -> list[dict[str, Any]]:
        """The files, as /api/models/NAME/tree/REVISION lists them."""
        return [
            {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": etag(path)}
            for path in self.files_of(name)
        ]


def etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        """Writes nothing."""

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", X_Error_Code=code, X_Error_Message=code)

    def _repository(self, name: str) -> bool:
        """False, and an answer, if it is not there for this client."""
        if name not in self.hub.repositories:
            self._refuse(404, "RepoNotFound")
        elif name in self.hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "GatedRepo")
        else:
            return True
        return False

    def do_GET(self) -> None:
        """HEAD, too."""
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            name, rest = "/".join(parts[2:4]), parts[4:]
            if not self._repository(name):
                return
            if len(rest) > 1 and not self.hub.is_revision(name, rest[1]):
                self._refuse(404, "RevisionNotFound")
                return
            value = self.hub.tree(name) if rest[:1] == ["tree"] else self.hub.info(name)
            self._answer(200, json.dumps(value).encode(), Content_Type="application/json")
        elif len(parts) == 5 and parts[2] == "resolve":
            name, revision, file = "/".join(parts[:2]), parts[3], parts[4]
            if not self._repository(name):
                return
            found = self.hub.repositories[name] / file
            if not self.hub.is_revision(name, revision):
                self._refuse(404, "RevisionNotFound")
            elif not found.is_file():
                self._refuse(404, "EntryNotFound")
            else:
                commit = self.hub.commit_of(name)
                self._answer(200, found.read_bytes(), ETag=f'"{etag(found)}"', X_Repo_Commit=commit)
        else:
            self._refuse(404, "EntryNotFound")

    do_HEAD = do_GET  # noqa: N815


@contextmanager
def fake_hub(home: Path) -> Iterator[FakeHub]:
    """A hub without repositories, on a free port of this machine."""

    class Handler(_Handler):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Handler.hub = FakeHub(f"http://127.0.0.1:{server.server_port}", home)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
