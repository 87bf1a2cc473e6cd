"""vocab.json and merges.txt, the files of GPT-2's byte-level BPE. The tokenizer's class says how texts are cut."""

from __future__ import annotations

from pathlib import Path

from kvanta.errors import InputError
from kvanta.files.json_file import read_regular_file
from kvanta.text.tokenizer_files.files import (
    BYTE_LEVEL_DECODER,
    AddedToken,
    FolderSettings,
    Json,
    TokenizerDescription,
    bpe,
    check_not_a_pointer,
    read_json,
    split_by,
    tokenizer_json,
)

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_CLASSES = ("GPT2Tokenizer", "CodeGenTokenizer")
_QWEN2_CLASSES = ("Qwen2Tokenizer",)


def read_vocab_merges(path: Path, settings: FolderSettings) -> TokenizerDescription:
    """`path`: vocab.json. Raises InputError for damaged files and for classes that are not known."""
    kind = settings.tokenizer_class or ("Qwen2Tokenizer" if settings.model_type.startswith("qwen") else "GPT2Tokenizer")
    if kind not in (*_GPT2_CLASSES, *_QWEN2_CLASSES):
        known = ", ".join((*_GPT2_CLASSES, *_QWEN2_CLASSES))
        raise InputError(
            f"{path} is of the tokenizer class {kind!r:.60}; vocab.json with merges.txt is read for {known}, "
            "tokenizer.json for every class"
        )
    vocabulary = read_json(path)
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in vocabulary.values()):
        raise InputError(f"{path}: an id is not a whole number")
    merges = _read_merges(path.parent / "merges.txt", vocabulary)
    added = dict(settings.added)
    special = _special_texts(settings, kind)
    known_texts = {token.content for token in added.values()}
    for text in special.values():
        if text in vocabulary and text not in known_texts:
            added[vocabulary[text]] = AddedToken(text)
    qwen2 = kind in _QWEN2_CLASSES
    description = tokenizer_json(
        bpe(vocabulary, merges),
        added=added,
        normalizer={"type": "NFC"} if qwen2 else None,
        pre_tokenizer=split_by(_QWEN2_PATTERN) if qwen2 else _gpt2_cut(settings),
        decoder=BYTE_LEVEL_DECODER,
    )
    return TokenizerDescription(path, description, special, adds_bos=False)


def _gpt2_cut(settings: FolderSettings) -> Json:
    prefix = bool(settings.config.get("add_prefix_space"))
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": True}


def _special_texts(settings: FolderSettings, kind: str) -> dict[str, str]:
    """Defaults of the classes, for folders whose configuration is silent."""
    if kind in _QWEN2_CLASSES:
        return {"eos_token": "<|endoftext|>"}
    return {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def _read_merges(path: Path, vocabulary: Json) -> list[tuple[str, str]]:
    if not path.is_file():
        raise InputError(f"{path.parent} has vocab.json, but neither merges.txt nor tokenizer.json")
    check_not_a_pointer(path)
    try:
        lines = read_regular_file(path).split("\n")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    merges = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise InputError(f"{path} line {number}: {line!r:.60} does not join two tokens of vocab.json to a third")
        merges.append((left, right))
    return merges
