"""tokenizer.json from the vocabulary in a GGUF file: byte-level BPE ("gpt2") or SentencePiece BPE ("llama")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvanta.errors import InputError
from kvanta.gguf.pre_tokenizers import PRE_TOKENIZERS
from kvanta.text.tokenizer_files.files import bpe
from kvanta.text.tokenizer_files.merges import merges_by_rank, merges_by_score

Json = dict[str, Any]

# tokenizer.ggml.token_type
NORMAL, _UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_NOT_MERGED = (_UNKNOWN, CONTROL, UNUSED, BYTE)


def added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[Json]:
    """Tokens that are matched in the text before anything else; control tokens are special (not shown in output)."""
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED, _UNKNOWN) and token
    ]


def _processor(tokens: Sequence[str], bos_id: int | None, eos_id: int | None) -> Json | None:
    """Puts a token before and after every text, unless None."""
    ids = [index for index in (bos_id, eos_id) if index is not None]
    if not ids:
        return None

    def part(name: str, kind: int) -> list[Json]:
        before = [] if bos_id is None else [{"SpecialToken": {"id": tokens[bos_id], "type_id": kind}}]
        after = [] if eos_id is None else [{"SpecialToken": {"id": tokens[eos_id], "type_id": kind}}]
        return [*before, {"Sequence": {"id": name, "type_id": kind}}, *after]

    return {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": [*part("A", 0), *part("B", 1)],
        "special_tokens": {
            tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]} for index in ids
        },
    }


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if token in vocabulary:
            raise InputError(f"the GGUF vocabulary has {token!r} twice: tokens {vocabulary[token]} and {index}")
        vocabulary[token] = index
    return vocabulary


def _pairs(merges: Sequence[str], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise InputError(f"GGUF merge {merge!r} does not join two tokens of the vocabulary to a third")
        pairs.append((left, right))
    return pairs


def byte_level_bpe(
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Sequence[str],
    pre: str,
    bos_id: int | None,
    eos_id: int | None = None,
) -> Json:
    """The GPT-2 family. `pre` is tokenizer.ggml.pre; `bos_id` and `eos_id` are put around every text unless None."""
    if pre not in PRE_TOKENIZERS:
        raise InputError(f"GGUF pre-tokenizer {pre!r} is not known; known: {', '.join(sorted(PRE_TOKENIZERS))}")
    vocabulary = _vocabulary(tokens)
    pairs = _pairs(merges, vocabulary)
    kind = PRE_TOKENIZERS[pre]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(tokens, types),
        "normalizer": {"type": "NFC"} if kind.nfc else None,
        "pre_tokenizer": kind.json(),
        "post_processor": _processor(tokens, bos_id, eos_id),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": bpe(vocabulary, pairs, ignore_merges=kind.whole_words_first),
    }


def _merged(tokens: Sequence[str], types: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Tokens that merges make, with their ids."""
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if token and kind not in _NOT_MERGED:
            yield index, token


def merges_by_order(tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    """Merges of a vocabulary in the order of its ranks (tiktoken's), which needs no list of them."""
    _vocabulary(tokens)
    ranks = {token: index for index, token in _merged(tokens, types)}
    return [f"{left} {right}" for left, right in merges_by_rank(ranks, ranks)]


def sentencepiece_bpe(
    tokens: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float],
    unknown_id: int,
    bos_id: int | None,
    add_space_prefix: bool,
    eos_id: int | None = None,
    merges: Sequence[str] | None = None,
) -> Json:
    """The Llama 2 family: spaces are U+2581, unknown characters fall back to byte tokens <0x00>..<0xFF>.

    `merges`: in their order (Gemma 4); without them, `scores` give it.
    """
    vocabulary = _vocabulary(tokens)
    if merges is None:
        pairs = merges_by_score({token: scores[index] for index, token in _merged(tokens, types)})
    else:
        pairs = _pairs(merges, vocabulary)
    to_blocks: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
    from_blocks: list[Json] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if add_space_prefix:
        to_blocks.insert(0, {"type": "Prepend", "prepend": "\u2581"})
        from_blocks.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(tokens, types),
        "normalizer": {"type": "Sequence", "normalizers": to_blocks},
        "pre_tokenizer": None,
        "post_processor": _processor(tokens, bos_id, eos_id),
        "decoder": {"type": "Sequence", "decoders": from_blocks},
        "model": bpe(
            vocabulary,
            pairs,
            unk_token=tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }
