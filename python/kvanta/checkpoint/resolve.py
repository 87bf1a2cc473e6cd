"""Resolution of MODEL: a folder, a .gguf file, one of a few names, or a hub id."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from kvanta.errors import InputError, ResourceError
from kvanta.files.home_folder import CONVERTER_VERSION, kvanta_home, user_home
from kvanta.gguf.parts import model_name, part_paths
from kvanta.params.checks import nearest, one_line
from kvanta.text.tokenizer_files.files import check_not_a_pointer

SHIPPED = Path(__file__).parents[1] / "shipped"
NAMES = ("stories260k", "smollm2")
_EXAMPLE_CONFIGS = Path(__file__).parents[1] / "example_configs"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?::[\w.-]+)?")
"""ORGANIZATION/MODEL, and perhaps the quantization of its GGUF files, as llama.cpp and Ollama write it."""
_HUB_PREFIXES = ("https://huggingface.co/", "huggingface.co/", "https://hf.co/", "hf.co/")
_NO_MODEL = re.compile(r"mmproj|imatrix|lora", re.IGNORECASE)
_USUAL_QUANTIZATION = "Q4_K_M"
_LATEST = "latest"
_HUB_FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_FILES += ["tokenizer.model", "tiktoken.model", "*.tiktoken", "merges.txt"]
# Copies of the weights in other layouts, and what comes with them.
_NOT_FROM_HUB = ["original/*", "metal/*", "onnx/*", "openvino/*", "consolidated*", "params.json", "*/*.safetensors"]
_GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True)
class ModelFolder:
    """A model on this machine, in Hugging Face layout."""

    name: str
    """MODEL as the user gave it, for reports."""
    path: Path


@dataclass(frozen=True)
class HubAccess:
    """Settings of downloads from the hub. Empty: the default of the package huggingface_hub."""

    revision: str = ""
    token: str | bool = ""
    folder: str = ""


_DEFAULT_ACCESS = HubAccess()


def _gguf_folder(file: Path) -> Path:
    """The folder that describes the GGUF file; made when the file is first used, or has changed."""
    # The whole file is not hashed: it may be tens of gigabytes.
    identity = str(CONVERTER_VERSION)
    for part in part_paths(file):
        status = part.stat()
        identity += f"|{part.resolve()}|{status.st_size}|{status.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    folder = kvanta_home() / "models" / f"{model_name(file)}-{digest}"
    if not (folder / "config.json").is_file():
        from kvanta.gguf.convert import index_gguf

        index_gguf(file, folder)
    return folder


def _from_hub(name: str, files: list[str], hub: HubAccess = _DEFAULT_ACCESS) -> Path:
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not (hub.folder or any(os.environ.get(each) for each in _HUB_FOLDERS)):
        user_home("HF_HOME")
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                allow_patterns=files,
                ignore_patterns=_NOT_FROM_HUB,
                revision=hub.revision or None,
                token=hub.token or None,
                cache_dir=hub.folder or None,
            )
        )
    except ValueError as error:
        raise InputError(f"{name!r} is neither a folder nor a hub id: {' '.join(str(error).split())[:300]}") from None
    except Exception as error:  # network, disk, missing repository: the package has no common base for them
        if (cached := _cached_by_others(name, error, hub)) is not None:
            return cached
        reason = " ".join(str(error).split())[:300]
        raise ResourceError(f"there is no folder {name!r}, and the hub does not give it: {reason}") from None


def _cached_by_others(name: str, error: Exception, hub: HubAccess) -> Path | None:
    """Without a network, the snapshot that another program has downloaded: it need not have all files that match."""
    import huggingface_hub

    if type(error).__name__ != "IncompleteSnapshotError":
        return None
    file = huggingface_hub.try_to_load_from_cache(
        name, "config.json", cache_dir=hub.folder or None, revision=hub.revision or None
    )
    return Path(file).parent if isinstance(file, str) else None


def _checkpoint_from_hub(name: str, hub: HubAccess) -> Path:
    repository, colon, quantization = name.partition(":")
    if colon:
        file = _gguf_from_hub(repository, quantization, hub)
        if file is not None:
            return _gguf_folder(file)
        if quantization != _LATEST:
            raise InputError(f"{repository!r} has no GGUF file of the quantization {quantization!r} on the hub")
    folder = _from_hub(repository, _HUB_FILES, hub)
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{repository!r} has no config.json on the hub; if it has GGUF files, name the quantization, such as "
            f"{repository}:{_USUAL_QUANTIZATION}, or download one of them and give the file as MODEL"
        )
    return folder


def _gguf_from_hub(name: str, quantization: str, hub: HubAccess) -> Path | None:
    """The GGUF file of a quantization, or the first part of it; None: the repository has none.

    _LATEST is the usual one, or the first file where there is none of it, as llama.cpp chooses.
    """
    if quantization == _LATEST:
        return _gguf_fitting(name, _USUAL_QUANTIZATION, hub) or _gguf_fitting(name, "", hub)
    return _gguf_fitting(name, quantization, hub)


def _gguf_fitting(name: str, wanted: str, hub: HubAccess) -> Path | None:
    """The first GGUF file of a quantization; empty: of any."""
    exact = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?![A-Za-z0-9_])", re.IGNORECASE)

    def fits(file: str) -> bool:
        base = file.rpartition("/")[2]
        named = not wanted or exact.search(base) is not None
        return base.endswith(".gguf") and named and not _NO_MODEL.search(base)

    listed = _hub_files(name, hub)
    files = sorted(file for file in listed if fits(file))
    if listed and not files:
        return None
    if not wanted and files:  # one file of several, or all parts of it
        stem = model_name(Path(files[0]))
        files = [file for file in files if model_name(Path(file)) == stem]
    # Without a network, those that were downloaded before.
    folder = _from_hub(name, files or [f"*{wanted}*.gguf"], hub)
    found = sorted(file for file in folder.rglob("*.gguf") if fits(file.name))
    return found[0] if found else None


def _hub_files(name: str, hub: HubAccess) -> list[str]:
    """Names of a repository's files; none if the hub does not answer, for which a download has the reason."""
    import huggingface_hub

    try:
        return huggingface_hub.HfApi(token=hub.token or None).list_repo_files(name, revision=hub.revision or None)
    except Exception:  # network, missing repository: the package has no common base for them
        return []


def resolve_model(model: str | os.PathLike[str], hub: HubAccess = _DEFAULT_ACCESS) -> ModelFolder:
    """Finds, or downloads and converts, what `model` means. Raises InputError or ResourceError."""
    name = str(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else ""
    local = _local_model(model)
    if local is None:
        return ModelFolder(name, _checkpoint_from_hub(_hub_name(name), hub))
    snapshot = local.path.parent.name == "snapshots" and local.path.name == hub.revision  # of the hub's own cache
    if hub.revision and not snapshot:
        raise InputError(
            f"the revision {one_line(hub.revision)} is given for {name!r}, which is on this machine; "
            "only a hub id (ORGANIZATION/MODEL) has revisions"
        )
    return local


def _hub_name(name: str) -> str:
    """A hub id without the hub's address."""
    prefix = next((each for each in _HUB_PREFIXES if name.startswith(each)), "")
    return name.removeprefix(prefix).rstrip("/") if prefix else name


def _is_gguf(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC


def _snapshot_in(folder: Path) -> Path:
    """The snapshot that `folder` of the hub's cache has (models--org--name); another folder is the model itself."""
    commit = folder / "refs" / "main"
    if (folder / "config.json").exists() or not commit.is_file():
        return folder
    snapshot = folder / "snapshots" / commit.read_text(errors="replace").strip()[:64]
    return snapshot if snapshot.is_dir() else folder


def _local_model(model: str | os.PathLike[str]) -> ModelFolder | None:
    """The model on this machine; None for a hub id."""
    name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else ""
    if not isinstance(name, str) or not name:
        raise InputError(
            f"MODEL is {one_line(model)}; give a Hugging Face id, a folder, a .gguf file, or one of: {', '.join(NAMES)}"
        )
    path = Path(name).expanduser()
    try:
        str(path).encode()  # what the C++ library takes
        if path.is_dir():
            return ModelFolder(name, _snapshot_in(path))
        if path.is_file():
            if path.suffix.lower() == ".gguf" or _is_gguf(path):  # Ollama's blobs have no suffix
                check_not_a_pointer(path)
                return ModelFolder(name, _gguf_folder(path))
            folder = f"; give its folder, {path.parent}" if path.suffix in (".safetensors", ".json") else ""
            raise InputError(f"{name!r} is a file, but neither a folder nor a .gguf file{folder}")
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name[:100]!r} is not a path: {error}") from None
    if name == "stories260k":
        return ModelFolder(name, SHIPPED / name)
    if name == "smollm2":
        from kvanta.checkpoint.smollm2 import smollm2_folder

        return ModelFolder(name, smollm2_folder())
    if _HUB_ID.fullmatch(_hub_name(name)) and path.suffix.lower() != ".gguf":
        return None
    raise InputError(
        f"there is no model {name!r}: no folder, .gguf file or Hugging Face id (ORGANIZATION/MODEL), and not one of: "
        f"{', '.join(NAMES)}"
        f"{nearest(name, NAMES)}"
    )


def example_configs() -> list[str]:
    """Names of the shipped configs: shapes of well-known models, to plan with, without weights."""
    return sorted(file.stem for file in _EXAMPLE_CONFIGS.glob("*.json"))


def resolve_config(model: str | os.PathLike[str]) -> ModelFolder:
    """Like resolve_model, for what needs no weights: MODEL may also be a config.json or the name of an example config.

    `path` is then the JSON file. Of a hub id, only JSON files are downloaded.
    """
    name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else ""
    if isinstance(name, str) and name:
        path = Path(name).expanduser()
        if path.suffix.lower() == ".json" and path.is_file():
            return ModelFolder(name, path)
        if name.lower() in example_configs() and not path.exists():
            return ModelFolder(name, _EXAMPLE_CONFIGS / f"{name.lower()}.json")
        if _HUB_ID.fullmatch(name) and path.suffix.lower() != ".gguf" and not path.exists():
            return ModelFolder(name, _from_hub(name, ["*.json"]))
    try:
        return resolve_model(model)
    except InputError as error:
        names = ", ".join(example_configs())
        similar = nearest(str(model).lower(), example_configs())
        raise InputError(f"{error}{similar or f'; example configs: {names}'}") from None
