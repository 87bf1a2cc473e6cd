"""tokenizer.model of SentencePiece: byte pairs by score (Llama 2, Mistral, Gemma, Phi-3) and unigrams.

The file is a protobuf message, of which a few fields are needed: sentencepiece_model.py reads them.
"""

from __future__ import annotations

import base64
from pathlib import Path

from kvanta.errors import InputError
from kvanta.text.tokenizer_files.files import (
    AddedToken,
    FolderSettings,
    Json,
    TokenizerDescription,
    bpe,
    sequence,
    tokenizer_json,
)
from kvanta.text.tokenizer_files.merges import check_token_sizes, merges_by_score
from kvanta.text.tokenizer_files.sentencepiece_model import Kind, SentencePieceModel, read_model

_BLOCK = "\u2581"
_UNIGRAM, _BPE = 1, 2


def read_sentencepiece(path: Path, settings: FolderSettings) -> TokenizerDescription:
    """Raises InputError for a damaged file, and for a kind of model that is not known."""
    model = read_model(path)
    if model.model_type not in (_UNIGRAM, _BPE) or not model.escapes_spaces or model.spaces_end_words:
        raise InputError(
            f"{path} is a SentencePiece model of type {model.model_type}, escape_whitespaces={model.escapes_spaces}, "
            f"treat_whitespace_as_suffix={model.spaces_end_words}: BPE and unigrams with a space before a word are read"
        )
    vocabulary = {piece.text: index for index, piece in enumerate(model.pieces)}
    if len(vocabulary) != len(model.pieces):
        raise InputError(f"{path} has the same piece twice")
    if model.model_type == _BPE:
        check_token_sizes(path, vocabulary)
    # Settings of Hugging Face's classes: a space before every part between special tokens, or before the text alone.
    legacy = settings.config.get("legacy") is not False or model.removes_spaces
    prefix = model.adds_prefix
    if isinstance(settings.config.get("add_prefix_space"), bool):
        prefix = settings.config["add_prefix_space"]
    description = tokenizer_json(
        _byte_pairs(model, vocabulary) if model.model_type == _BPE else _unigrams(model),
        added=_added(model, settings),
        normalizer=sequence("Sequence", "normalizers", _normalizers(model, prefix=prefix and legacy)),
        pre_tokenizer=None,
        decoder=_decoder(prefix=prefix),
    )
    special = {
        name: model.pieces[index].text
        for name, index in model.special_ids.items()
        if 0 <= index < len(model.pieces) and model.pieces[index].kind in (Kind.CONTROL, Kind.UNKNOWN)
    }
    return TokenizerDescription(
        path,
        description,
        special,
        adds_bos=model.model_type == _BPE and "bos_token" in special,
        prefix_space=prefix and not legacy,
    )


def _normalizers(model: SentencePieceModel, *, prefix: bool) -> list[Json]:
    steps: list[Json] = []
    if model.character_map:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.character_map).decode()})
    if model.removes_spaces:
        steps.append({"type": "Replace", "pattern": {"Regex": rf"\A +|[ {_BLOCK}]+\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if prefix:
        steps.append({"type": "Prepend", "prepend": _BLOCK})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _BLOCK})
    return steps


def _decoder(*, prefix: bool) -> Json:
    steps: list[Json] = [
        {"type": "Replace", "pattern": {"String": _BLOCK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _added(model: SentencePieceModel, settings: FolderSettings) -> dict[int, AddedToken]:
    """Control pieces are special tokens; pieces of the user's are matched in the normalized text."""
    added = {}
    for index, piece in enumerate(model.pieces):
        if piece.kind in (Kind.CONTROL, Kind.UNKNOWN):
            added[index] = AddedToken(piece.text)
        elif piece.kind == Kind.USER_DEFINED:
            added[index] = AddedToken(piece.text, special=False, normalized=True)
    pieces = model.pieces
    own = {i: token for i, token in settings.added.items() if i >= len(pieces) or pieces[i].text == token.content}
    return added | own


def _byte_pairs(model: SentencePieceModel, vocabulary: dict[str, int]) -> Json:
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind in (Kind.NORMAL, Kind.USER_DEFINED)}
    return bpe(
        vocabulary,
        merges_by_score(scores),
        unk_token=model.unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _unigrams(model: SentencePieceModel) -> Json:
    return {
        "type": "Unigram",
        "unk_id": model.special_ids["unk_token"],
        "vocab": [[piece.text, piece.score] for piece in model.pieces],
        "byte_fallback": model.byte_fallback,
    }
