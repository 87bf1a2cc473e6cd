"""From tokens to text, one token at a time, without ever splitting a character.

Every token stands for bytes: byte-level BPE spells them with 256 printable characters, SentencePiece has pieces with
U+2581 for a space and byte tokens <0x00>..<0xFF>; the decoder in tokenizer.json says which. Joined bytes are decoded as
UTF-8; what cannot be valid becomes U+FFFD. So the text of a sequence is the same however it was cut into steps.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from kvanta.errors import InputError

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


def _decoder_steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", []) for step in _decoder_steps(part)]
    return [decoder]


def _replacement(step: Mapping[str, Any]) -> Callable[[str], str]:
    """The change that a step of the type Metaspace or Replace makes in a token."""
    if step["type"] == "Metaspace":
        return lambda token: token.replace(str(step.get("replacement", "\u2581")), " ")
    pattern, content = step.get("pattern"), str(step.get("content", ""))
    kinds: Mapping[str, Any] = pattern if isinstance(pattern, Mapping) else {}
    if isinstance(kinds.get("String"), str):
        return lambda token: token.replace(kinds["String"], content)
    text = str(kinds.get("Regex"))
    if text == "None" or re.escape(text) != text:  # it may match across tokens, and its syntax is another library's
        raise InputError(f"its decoder replaces the pattern {text!r:.40}; supported are texts without a regex syntax")
    return lambda token: token.replace(text, content)


_KNOWN_STEPS = ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip")


def _check_step(step: Mapping[str, Any]) -> None:
    kind = step.get("type")
    if kind not in _KNOWN_STEPS:
        raise InputError(f"its decoder is {kind!r:.40}; supported are {', '.join(_KNOWN_STEPS)}")
    if kind == "Strip" and (step.get("content"), step.get("start"), step.get("stop")) != (" ", 1, 0):
        raise InputError("its decoder strips other characters than one space at the start of a text")


class TokenBytes:
    """The bytes of every token of a vocabulary, from the description in tokenizer.json.

    Raises InputError for a decoder that is not a list of known steps: the text would be a wrong one.
    """

    def __init__(
        self, tokens: Sequence[str | None], added: Mapping[int, str], special: Iterable[int], decoder: Any
    ) -> None:
        steps = _decoder_steps(decoder)
        for step in steps:
            _check_step(step)
        kinds = {step["type"] for step in steps}
        replacements = [_replacement(step) for step in steps if step["type"] in ("Metaspace", "Replace")]
        # Without a decoder, `tokenizers` joins tokens with spaces.
        separator = b"" if steps else b" "

        def spell(token: str) -> bytes:
            byte = _BYTE_TOKEN.fullmatch(token) if "ByteFallback" in kinds else None
            if byte is not None:
                return bytes([int(byte[1], 16)])
            for replace in replacements:
                token = replace(token)
            return separator + token.encode()

        in_bytes = "ByteLevel" in kinds
        self._table: list[bytes] = [
            b"" if token is None else _byte_level(token) if in_bytes else spell(token) for token in tokens
        ]
        for index, text in added.items():  # SentencePiece's may have blocks for spaces, as Gemma's do
            self._table[index] = text.encode() if in_bytes else spell(text)
        self.special = frozenset(special)
        # SentencePiece puts a space before a text's first word; decoding takes it away again.
        self.drops_first_space = (
            not steps
            or "Strip" in kinds
            or any(step["type"] == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps)
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
