"""The tokenizer of a GGUF file: the tokenizer.ggml.* keys as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvanta.errors import InputError
from kvanta.gguf.metadata import Metadata
from kvanta.gguf.pre_tokenizers import PRE_TOKENIZERS
from kvanta.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    byte_level_bpe,
    merges_by_order,
    sentencepiece_bpe,
)
from kvanta.text.tokenizer_files.merges import check_token_sizes

_GEMMA4_ENDINGS = ("<eos>", "<turn|>", "<|tool_response>")
# Control tokens that end a text or a turn, whatever eos_token_id says (llama.cpp has the same rule).
_ENDINGS = {
    "<|endoftext|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<|eot|>",
    "<|eom_id|>",
    "</s>",
    "<EOT>",
    "[EOT]",
    "<|return|>",
    "<|call|>",
    "<|user|>",
    "<|observation|>",
    *_GEMMA4_ENDINGS,
    "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
_CONTROLS = {*_ENDINGS, "<s>", "<unk>", "<bos>", "<pad>", "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>"}
_CONTROLS |= {"<|begin_of_text|>", "<start_of_turn>", "<|startoftext|>"}
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Vocabulary:
    """Tokens, special ids and the description of the tokenizer. Raises InputError that names the file."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        tokens: list[str] = metadata.array("tokenizer.ggml.tokens", str)
        self.warnings: list[str] = []
        """What may be wrong with the tokens of texts."""
        self.tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]  # as in llama.cpp
        count = len(self.tokens)
        check_token_sizes(metadata.path, self.tokens)
        self.types = self._types()
        # Files of the Llama 2 family may leave out what SentencePiece has by default.
        defaults = {"bos": 1, "eos": 2, "unknown": 0} if metadata.value("tokenizer.ggml.model") == "llama" else {}

        def special(name: str) -> int | None:
            key = f"tokenizer.ggml.{name}_token_id"
            if metadata.value(key) is None and defaults.get(name, count) < count:
                return defaults[name]
            return metadata.token_id(key, count)

        self.bos, self.eos, self.unknown = special("bos"), special("eos"), special("unknown")
        padding = metadata.value("tokenizer.ggml.padding_token_id")
        # Some files have one beyond the vocabulary, which does no harm: it is not used.
        is_beyond = isinstance(padding, int) and padding >= count
        self.padding = None if is_beyond else metadata.token_id("tokenizer.ggml.padding_token_id", count)
        if metadata.value("tokenizer.ggml.model") == "gemma4":  # some files have others types for them
            for index, token in enumerate(self.tokens):
                self.types[index] = CONTROL if token in _GEMMA4_ENDINGS else self.types[index]
        self.endings = self._endings([self.eos, special("eot"), special("eom")])
        self._rename_duplicates()
        self.add_bos = self.add_eos = False
        self.tokenizer = self._tokenizer()

    def _types(self) -> list[int]:
        """Without the key, what llama.cpp finds by itself."""
        key = "tokenizer.ggml.token_type"
        if self._metadata.value(key) is not None:
            return self._metadata.array(key, int, len(self.tokens))
        return [
            BYTE if _BYTE_TOKEN.fullmatch(token) else CONTROL if token in _CONTROLS else NORMAL for token in self.tokens
        ]

    def _scores(self) -> list[float]:
        """Without the key, tokens that come first are merged first, as SentencePiece orders them."""
        key = "tokenizer.ggml.scores"
        if self._metadata.value(key) is not None:
            return self._metadata.array(key, float, len(self.tokens))
        self.warnings.append("the GGUF file has no scores: texts are cut into tokens in the order of the ids")
        return [-float(index) for index in range(len(self.tokens))]

    def _rename_duplicates(self) -> None:
        """Renames all but the last of tokens with the same text, into which texts are cut, as in llama.cpp."""
        last = {token: index for index, token in enumerate(self.tokens)}
        for index, token in enumerate(self.tokens):
            if last[token] != index:
                self.tokens[index] = f"[DUPLICATE_{index}]"
                self.types[index] = UNUSED

    def _pre_tokenizer(self) -> str:
        """The name of the pattern; old files have none."""
        pre = self._metadata.text("tokenizer.ggml.pre", "default")
        if pre != "default" or self._metadata.value("tokenizer.ggml.model") != "gpt2":
            return pre
        if "<|eot_id|>" in self.tokens and "<|start_header_id|>" in self.tokens:
            return "llama-bpe"
        self.warnings.append(
            "the GGUF file names no pre-tokenizer (tokenizer.ggml.pre): texts are cut as for GPT-2, which may be "
            "wrong; convert the model again"
        )
        return pre

    def _endings(self, named: Sequence[int | None]) -> list[int]:
        """Ids that end a text: those that the file names, and those with a known text."""
        endings = [token for token in named if token is not None]
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            # A tag of HTML is a user-defined token in some vocabularies.
            if token in _ENDINGS and (kind == CONTROL or (kind == USER_DEFINED and token != "</s>")):
                endings.append(index)
        texts = {self.tokens[index] for index in endings}
        if {"<|return|>", "<|call|>"} <= texts:  # GPT-OSS: <|end|> ends a message, which another one follows
            endings = [index for index in endings if self.tokens[index] != "<|end|>"]
        if "<|tool_response>" in texts:  # Gemma 4: a tag of HTML
            endings = [index for index in endings if self.tokens[index] != "</s>"]
        return list(dict.fromkeys(endings))

    def _unknown_id(self) -> int:
        if self.unknown is not None:
            return self.unknown
        return self.tokens.index("<unk>") if "<unk>" in self.tokens else 0

    def _tokenizer(self) -> dict[str, Any]:
        metadata = self._metadata
        model = metadata.text("tokenizer.ggml.model")
        if model not in ("gpt2", "llama", "gemma4"):
            raise InputError(
                f"{metadata.path} has the tokenizer {model!r}; known: gpt2 (byte-level BPE), llama (BPE), gemma4 (BPE)"
            )
        pre = self._pre_tokenizer()
        known = PRE_TOKENIZERS.get(pre)
        if model == "gpt2" and known is None:
            names = ", ".join(sorted(PRE_TOKENIZERS))
            raise InputError(f"{metadata.path}: GGUF pre-tokenizer {pre!r} is not known; known: {names}")
        adds_bos = model in ("llama", "gemma4") or (known is not None and known.adds_bos)
        # As in llama.cpp, whatever a file of Gemma 4 says.
        self.add_bos = model == "gemma4" or metadata.flag("tokenizer.ggml.add_bos_token", adds_bos)
        self.add_eos = metadata.flag("tokenizer.ggml.add_eos_token", False)
        prefix = self.bos if self.add_bos else None
        suffix = self.eos if self.add_eos else None
        try:
            if model == "gpt2":
                if pre == "kimi-k2" and metadata.value("tokenizer.ggml.merges") is None:
                    merges = merges_by_order(self.tokens, self.types)
                else:
                    merges = metadata.array("tokenizer.ggml.merges", str)
                return byte_level_bpe(self.tokens, self.types, merges, pre, prefix, suffix)
            has_merges = model == "gemma4"
            return sentencepiece_bpe(
                self.tokens,
                self.types,
                [] if has_merges else self._scores(),
                self._unknown_id(),
                prefix,
                metadata.flag("tokenizer.ggml.add_space_prefix", not has_merges),
                suffix,
                metadata.array("tokenizer.ggml.merges", str) if has_merges else None,
            )
        except InputError as error:
            named = str(error).startswith(str(metadata.path))
            raise error if named else InputError(f"{metadata.path}: {error}") from None

    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json."""
        special = {"bos_token": self.bos, "eos_token": self.eos, "unk_token": self.unknown, "pad_token": self.padding}
        # A token that is named for padding may be one of the words.
        named = {
            name: self.tokens[token]
            for name, token in special.items()
            if token is not None and (name in ("bos_token", "eos_token") or self.types[token] != NORMAL)
        }
        warned = {"kvanta_warnings": self.warnings} if self.warnings else {}
        return {
            **warned,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.add_bos,
            "clean_up_tokenization_spaces": False,
            **named,
        }

    def special_ids(self) -> dict[str, Any]:
        """Ids for config.json and generation_config.json; absent ones are left out."""
        ids = {"bos_token_id": self.bos, "eos_token_id": self.endings or None, "pad_token_id": self.padding}
        return {name: value for name, value in ids.items() if value is not None}
