"""Reads the needed parts of SentencePiece's ModelProto from its bytes in protobuf's wire format."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvanta.errors import InputError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# Fields of the messages, by number.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_KIND = 1, 2, 3
_MODEL_TYPE, _SPACES_END_WORDS, _BYTE_FALLBACK = 3, 24, 35
_SPECIAL = {40: "unk_token", 41: "bos_token", 42: "eos_token", 43: "pad_token"}
_CHARACTER_MAP, _ADDS_PREFIX, _REMOVES_SPACES, _ESCAPES_SPACES = 2, 3, 4, 5


class Kind(enum.IntEnum):
    """Kinds of pieces."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class Piece:
    """One entry of the vocabulary; its place is its id."""

    text: str = ""
    score: float = 0.0
    kind: Kind = Kind.NORMAL


@dataclass
class SentencePieceModel:
    """A model, with the format's defaults."""

    pieces: list[Piece] = field(default_factory=list)
    model_type: int = 1
    """1: unigrams; 2: byte pairs; 3: words; 4: characters."""
    byte_fallback: bool = False
    spaces_end_words: bool = False
    special_ids: dict[str, int] = field(
        default_factory=lambda: {"unk_token": 0, "bos_token": 1, "eos_token": 2, "pad_token": -1}
    )
    character_map: bytes = b""
    adds_prefix: bool = True
    removes_spaces: bool = True
    escapes_spaces: bool = True

    @property
    def unknown(self) -> str | None:
        """The text of the piece for unknown characters."""
        return next((piece.text for piece in self.pieces if piece.kind == Kind.UNKNOWN), None)


def read_model(path: Path) -> SentencePieceModel:
    """Raises InputError for a damaged file."""
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    try:
        model = _read(data)
    except (ValueError, IndexError, struct.error) as error:
        raise InputError(f"{path} is not a SentencePiece model: {error or 'it ends too early'}") from None
    if not model.pieces:
        raise InputError(f"{path} is not a SentencePiece model: it has no pieces")
    return model


def _read(data: memoryview) -> SentencePieceModel:
    model = SentencePieceModel()
    for number, value in _fields(data):
        if number == _PIECES:
            model.pieces.append(_read_piece(_message(value)))
        elif number == _TRAINER:
            _read_trainer(model, _message(value))
        elif number == _NORMALIZER:
            _read_normalizer(model, _message(value))
    return model


def _read_piece(data: memoryview) -> Piece:
    piece = Piece()
    for number, value in _fields(data):
        if number == _PIECE_TEXT:
            piece.text = bytes(_message(value)).decode()
        elif number == _PIECE_SCORE:
            (piece.score,) = struct.unpack("<f", _message(value))
        elif number == _PIECE_KIND:
            piece.kind = Kind(_number(value))
    return piece


def _read_trainer(model: SentencePieceModel, data: memoryview) -> None:
    for number, value in _fields(data):
        if number == _MODEL_TYPE:
            model.model_type = _number(value)
        elif number == _SPACES_END_WORDS:
            model.spaces_end_words = bool(_number(value))
        elif number == _BYTE_FALLBACK:
            model.byte_fallback = bool(_number(value))
        elif number in _SPECIAL:
            index = _number(value)
            model.special_ids[_SPECIAL[number]] = index - (1 << 64) if index >> 63 else index


def _read_normalizer(model: SentencePieceModel, data: memoryview) -> None:
    for number, value in _fields(data):
        if number == _CHARACTER_MAP:
            model.character_map = bytes(_message(value))
        elif number == _ADDS_PREFIX:
            model.adds_prefix = bool(_number(value))
        elif number == _REMOVES_SPACES:
            model.removes_spaces = bool(_number(value))
        elif number == _ESCAPES_SPACES:
            model.escapes_spaces = bool(_number(value))


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Numbers and values of a message's fields."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"byte {at} has a field of the unknown kind {kind}")
        if size > len(data) - at:
            raise ValueError("it ends too early")
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
    raise ValueError(f"byte {at} has a number of more than 64 bits")


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a field has a number in place of bytes")
    return value


def _number(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise ValueError("a field has bytes in place of a number")
    return value
