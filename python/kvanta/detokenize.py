"""From tokens to text, one token at a time, without ever splitting a character.

Every token stands for bytes: byte-level BPE spells them with 256 printable characters, SentencePiece has pieces with
U+2581 for a space and byte tokens <0x00>..<0xFF>. Joined bytes are decoded as UTF-8; what cannot be valid becomes
U+FFFD. So the text of a sequence is the same however it was cut into steps.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@functools.cache
def byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE (GPT-2's bytes_to_unicode, inverted)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


def _byte_level(token: str) -> bytes:
    alphabet = byte_level_alphabet()
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def _decoder_steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", []) for step in _decoder_steps(part)]
    return [decoder]


class TokenBytes:
    """The bytes of every token of a vocabulary, from the description in tokenizer.json."""

    def __init__(
        self, tokens: Sequence[str | None], added: Mapping[int, str], special: Iterable[int], decoder: Any
    ) -> None:
        steps = _decoder_steps(decoder)
        kinds = {str(step.get("type")) for step in steps}
        spell: Callable[[str], bytes]
        if "ByteLevel" in kinds:
            spell = _byte_level
        elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
            spell = _sentence_piece
        else:
            spell = str.encode
        self._table: list[bytes] = [b"" if token is None else spell(token) for token in tokens]
        for index, text in added.items():  # SentencePiece's may have blocks for spaces, as Gemma's do
            self._table[index] = (spell if spell is _sentence_piece else str.encode)(text)
        self.special = frozenset(special)
        # SentencePiece puts a space before a text's first word; decoding takes it away again.
        self.drops_first_space = "Strip" in kinds or any(
            step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps
        )

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, token: int) -> bytes:
        """Empty for ids between the tokenizer's vocabulary and the model's, which has padding rows."""
        return self._table[token] if 0 <= token < len(self._table) else b""


class Detokenizer:
    """Text of one growing sequence. `at_start`: no text stands before it, so a first space is the tokenizer's own.

    `shown`: special tokens that are not skipped.
    """

    def __init__(
        self,
        table: TokenBytes,
        *,
        skip_special_tokens: bool = True,
        at_start: bool = False,
        shown: Collection[int] = (),
    ) -> None:
        self._table = table
        self._skipped: frozenset[int] = table.special.difference(shown) if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = at_start and table.drops_first_space

    def add(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` complete; bytes of an unfinished character are kept for later."""
        data = b"".join(self._table[token] for token in tokens if token not in self._skipped)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character, else nothing."""
        return self._utf8.decode(b"", final=True)
