"""tekken.json of Mistral's models since Mistral Nemo: byte pairs by rank, their pattern and the special tokens."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvanta.errors import InputError
from kvanta.text.detokenize import byte_level_alphabet
from kvanta.text.tokenizer_files.files import AddedToken, FolderSettings, Json, TokenizerDescription, read_json
from kvanta.text.tokenizer_files.tiktoken import byte_pair_json

# Special tokens of files that do not list theirs, by id.
_OLD_SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
_MAX_TOKENS = 1 << 24


def read_tekken(path: Path, settings: FolderSettings) -> TokenizerDescription:
    """Raises InputError for a damaged file."""
    file = read_json(path)
    pattern, reserved, tokens = _byte_pairs(path, file)
    size = reserved + len(tokens)
    added = {index: AddedToken(text) for index, text in enumerate(_special(path, file, reserved))}
    added |= {index: token for index, token in settings.added.items() if index >= size}
    description = byte_pair_json(path, tokens, reserved, pattern, added)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    known = {token.content for token in added.values()}
    return TokenizerDescription(
        path, description, {name: text for name, text in special.items() if text in known}, adds_bos=True
    )


def pattern_of(path: Path, vocabulary: Mapping[str, int]) -> str | None:
    """The pattern of a file next to a tokenizer.json with `vocabulary`; None if it has other tokens.

    Raises InputError for a damaged file.
    """
    pattern, reserved, tokens = _byte_pairs(path, read_json(path))
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    spelled = ("".join([letters[byte] for byte in token]) for token in tokens)
    is_same = all(vocabulary.get(token) == rank for rank, token in enumerate(spelled, reserved))
    return pattern if is_same else None


def _byte_pairs(path: Path, file: Json) -> tuple[str, int, list[bytes]]:
    """The pattern, the number of special tokens, and the tokens that follow them."""
    config = file.get("config")
    config = config if isinstance(config, dict) else {}
    pattern = config.get("pattern")
    if not isinstance(pattern, str):
        raise InputError(f"{path}: config.pattern is {pattern!r:.40}, not a text")
    reserved = _number(path, config, "default_num_special_tokens")
    size = _number(path, config, "default_vocab_size")
    return pattern, reserved, _tokens(path, file.get("vocab"), size - reserved)


def _number(path: Path, config: Json, name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MAX_TOKENS:
        raise InputError(f"{path}: config.{name} is {value!r:.40}, not a number from 1 to {_MAX_TOKENS - 1}")
    return value


def _tokens(path: Path, vocab: Any, count: int) -> list[bytes]:
    """The first `count` tokens by rank: the file may have more than the model."""
    if not isinstance(vocab, list) or not 256 <= count <= len(vocab):
        has = len(vocab) if isinstance(vocab, list) else 0
        raise InputError(f"{path} has {has} tokens in vocab; its config names {count} in addition to the special ones")
    tokens = []
    for rank, entry in enumerate(vocab[:count]):
        text = entry.get("token_bytes") if isinstance(entry, dict) and entry.get("rank") == rank else None
        try:
            tokens.append(base64.b64decode(text or "", validate=True))
        except (binascii.Error, ValueError, TypeError):
            tokens.append(b"")
        if not tokens[-1]:
            raise InputError(f"{path}: vocab has no token of rank {rank} with token_bytes in base64")
    if len(set(tokens)) != count:
        raise InputError(f"{path} has the same token twice")
    return tokens


def _special(path: Path, file: Json, reserved: int) -> list[str]:
    """The texts of the first ids."""
    listed = file.get("special_tokens")
    texts: dict[int, str] = dict(enumerate(_OLD_SPECIAL)) if listed is None else {}
    for entry in listed if isinstance(listed, list) else []:
        rank, text = (entry.get("rank"), entry.get("token_str")) if isinstance(entry, dict) else (None, None)
        if not isinstance(rank, int) or not isinstance(text, str) or not 0 <= rank < reserved:
            raise InputError(f"{path}: special_tokens has {entry!r:.60}, not a rank below {reserved} with token_str")
        texts[rank] = text
    return [texts.get(index, f"<SPECIAL_{index}>") for index in range(reserved)]
