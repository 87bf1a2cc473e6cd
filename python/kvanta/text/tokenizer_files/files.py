"""Files of a tokenizer, and parts of tokenizer.json that the formats share."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvanta.errors import InputError
from kvanta.files.json_file import read_regular_file

Json = dict[str, Any]

_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_TOKENS = 1 << 24


@dataclass(frozen=True)
class TokenizerDescription:
    """A tokenizer in the form of tokenizer.json."""

    path: Path
    json: Json
    special_texts: Mapping[str, str] = field(default_factory=dict)
    """bos_token and the other special tokens that the folder's configuration does not name."""
    adds_bos: bool | None = None
    """The tokenizer begins a text with bos_token; None: as `json` says."""
    prefix_space: bool = False
    """A space belongs before a text, unless that begins with a special token."""
    pattern_file: str = ""
    """The file whose pattern cuts texts, where that is not `path`."""


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched in the text before anything else."""

    content: str
    special: bool = True
    normalized: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False

    def as_json(self, index: int) -> Json:
        """The token as in tokenizer.json."""
        return {"id": index, **self.__dict__}


@dataclass(frozen=True)
class FolderSettings:
    """Settings in the other files of a tokenizer's folder."""

    folder: Path
    config: Mapping[str, Any]
    """tokenizer_config.json."""
    added: Mapping[int, AddedToken]
    """Added tokens of tokenizer_config.json and added_tokens.json."""

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any], special: Collection[str] | None = None) -> FolderSettings:
        """`special`: next to a tokenizer.json, texts that special tokens of added_tokens.json have; others are looked
        for in the normalized text, as in transformers. Raises InputError for entries that are not what they should be.
        """
        added = {}
        for content, index in read_json(folder / "added_tokens.json").items():
            is_special = special is not None and content in special
            token = AddedToken(content, is_special, normalized=special is not None and not is_special)
            added[_id(folder / "added_tokens.json", index)] = token
        declared = config.get("added_tokens_decoder")
        for key, entry in (declared if isinstance(declared, Mapping) else {}).items():
            path = folder / "tokenizer_config.json"
            index = _id(path, int(key) if str(key).isdecimal() and len(str(key)) < 10 else key)
            if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
                raise InputError(f"{path}: added token {index} has no content that is a text")
            flags = {
                name: bool(entry.get(name)) for name in ("special", "normalized", "single_word", "lstrip", "rstrip")
            }
            added[index] = AddedToken(entry["content"], **flags)
        return cls(folder, config, added)

    @property
    def model_type(self) -> str:
        """The architecture's name in config.json, or ""."""
        return str(read_json(self.folder / "config.json").get("model_type") or "")

    @property
    def tokenizer_class(self) -> str:
        """Class named by tokenizer_config.json, without "Fast"."""
        return tokenizer_class(self.config)


def tokenizer_class(config: Mapping[str, Any]) -> str:
    """Class named by tokenizer_config.json, without "Fast"; "" for none."""
    return str(config.get("tokenizer_class") or "").removesuffix("Fast")


def _id(path: Path, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_TOKENS:
        raise InputError(f"{path}: an added token has the id {value!r:.40}, not a number from 0 to {_MAX_TOKENS - 1}")
    return value


def check_not_a_pointer(path: Path) -> None:
    """Raises InputError for what Git LFS leaves in place of a large file."""
    if not path.is_file():  # a pipe would make the reader wait for ever
        raise InputError(f"{path} is not a regular file")
    try:
        with path.open("rb") as file:
            begin = file.read(len(_POINTER))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if begin == _POINTER:
        raise InputError(f"{path} is a Git LFS pointer, not the file itself: run git lfs pull in {path.parent}")


def read_json(path: Path) -> Json:
    """A JSON object; {} if there is no such file. Raises InputError for anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_regular_file(path))
    except (ValueError, RecursionError, OSError) as error:
        check_not_a_pointer(path)
        raise InputError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def tokenizer_json(
    model: Json,
    *,
    added: Mapping[int, AddedToken],
    normalizer: Json | None,
    pre_tokenizer: Json | None,
    decoder: Json,
) -> Json:
    """A description without a post-processor: the beginning of a text is added by Tokenizer."""
    if isinstance(model["vocab"], dict):  # an added token that the model does not have would get the next free id
        for index, token in added.items():
            model["vocab"].setdefault(token.content, index)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token.as_json(index) for index, token in sorted(added.items())],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def bpe(vocabulary: Mapping[str, int], merges: Iterable[tuple[str, str]], **settings: Any) -> Json:
    """The model of tokenizer.json."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **settings,
        "vocab": dict(vocabulary),
        "merges": [list(pair) for pair in merges],
    }


def sequence(kind: str, name: str, steps: list[Json]) -> Json | None:
    """One step, or several as a Sequence."""
    if len(steps) < 2:
        return steps[0] if steps else None
    return {"type": kind, name: steps}


BYTE_LEVEL_DECODER: Json = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
BYTES_ONLY: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split_by(pattern: str) -> Json:
    """Cuts a text into the matches of a pattern, and what is between them, before bytes become letters."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, BYTES_ONLY]}
