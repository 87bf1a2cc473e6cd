"""tiktoken files: a line for each token with its bytes in base64 and its rank, which is its id and orders the merges.

The file has neither the pattern that cuts texts nor the special tokens. The number of tokens tells the family, and
tokenizer_config.json has the special tokens where they differ from the family's own.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvanta.errors import InputError
from kvanta.text.detokenize import byte_level_alphabet
from kvanta.text.tokenizer_files.files import (
    BYTE_LEVEL_DECODER,
    AddedToken,
    FolderSettings,
    Json,
    TokenizerDescription,
    bpe,
    split_by,
    tokenizer_json,
)
from kvanta.text.tokenizer_files.merges import check_token_sizes, merges_by_rank

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]{1,9}")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_O200K_REST = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?|{_O200K_REST}"
)
_NO_HAN = r"&&[^\p{Han}]"
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NO_HAN}]*[{_LOWER}{_NO_HAN}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NO_HAN}]+[{_LOWER}{_NO_HAN}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Family:
    """Models with one vocabulary."""

    name: str
    pattern: str
    special: tuple[str, ...]
    """Special tokens, whose ids follow the vocabulary, in order."""
    reserved: tuple[int, str]
    """Number of special tokens, and the name of the further ones."""
    bos: str = ""
    eos: str = ""
    nfc: bool = False


_LLAMA3_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{index}|>" for index in range(3, 248)),
)
_FAMILIES: Mapping[int, _Family] = {
    128_000: _Family("Llama 3", _LLAMA3, _LLAMA3_SPECIAL, (256, ""), "<|begin_of_text|>", "<|eot_id|>"),
    151_643: _Family(
        "Qwen",
        _QWEN,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205))),
        (208, ""),
        eos="<|endoftext|>",
        nfc=True,
    ),
    163_584: _Family("Kimi K2", _KIMI, (), (256, "<|reserved_token_{}|>"), "[BOS]", "[EOS]"),
    199_998: _Family("GPT-OSS", _O200K, (), (0, ""), "<|startoftext|>", "<|return|>"),
}


def is_tiktoken(path: Path) -> bool:
    """True if the first line is one of this format."""
    try:
        with path.open("rb") as file:
            return _LINE.fullmatch(file.readline(4096).rstrip(b"\r\n")) is not None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def read_tiktoken(path: Path, settings: FolderSettings) -> TokenizerDescription:
    """Raises InputError for a damaged file, or one of an unknown family."""
    ranks = _read_ranks(path)
    family = _FAMILIES.get(len(ranks))
    if family is None:
        known = ", ".join(f"{each.name} ({size})" for size, each in _FAMILIES.items())
        raise InputError(
            f"{path} has {len(ranks)} tokens, which is none of the known vocabularies: {known}; tokenizer.json is "
            "read for every model"
        )
    size, filler = family.reserved
    names = [*family.special, *(filler.format(index + len(ranks)) for index in range(len(family.special), size))]
    added = {len(ranks) + index: AddedToken(name) for index, name in enumerate(names)}
    added |= {index: token for index, token in settings.added.items() if index >= len(ranks)}
    description = byte_pair_json(path, ranks, 0, family.pattern, added, nfc=family.nfc)
    known_texts = {token.content for token in added.values()}
    special = {"bos_token": family.bos, "eos_token": family.eos}
    special = {name: text for name, text in special.items() if text in known_texts}
    return TokenizerDescription(path, description, special, adds_bos=family.name == "Llama 3")


def byte_pair_json(
    path: Path,
    tokens: list[bytes],
    first_id: int,
    pattern: str,
    added: Mapping[int, AddedToken],
    *,
    nfc: bool = False,
) -> Json:
    """`tokens` by their ranks; the id of the first one is `first_id`. A word that is a token needs no merges.

    Raises InputError for tokens that are too long, and where a byte has none.
    """
    check_token_sizes(path, tokens)
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    spelled = ["".join(letters[byte] for byte in token) for token in tokens]
    vocabulary = {token: first_id + rank for rank, token in enumerate(spelled)}
    missing = [byte for byte in range(256) if letters[byte] not in vocabulary]
    if missing:
        raise InputError(f"{path} has no token for byte 0x{missing[0]:02x}")
    return tokenizer_json(
        bpe(vocabulary, merges_by_rank(spelled, vocabulary), ignore_merges=True),
        added=added,
        normalizer={"type": "NFC"} if nfc else None,
        pre_tokenizer=split_by(pattern),
        decoder=BYTE_LEVEL_DECODER,
    )


def _read_ranks(path: Path) -> list[bytes]:
    """The tokens by their ranks."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if _LINE.fullmatch(line) is None:
            raise InputError(f"{path} line {number} is no token in base64 with its rank: {line[:40]!r}")
        text, rank = line.split()
        try:
            tokens[int(rank)] = base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise InputError(f"{path} line {number}: {error}") from None
    if sorted(tokens) != list(range(len(tokens))):
        raise InputError(f"{path}: the ranks of its {len(tokens)} tokens are not 0 to {len(tokens) - 1}")
    ordered = [tokens[rank] for rank in range(len(tokens))]
    if len(set(ordered)) != len(ordered):
        raise InputError(f"{path} has the same token twice")
    return ordered
