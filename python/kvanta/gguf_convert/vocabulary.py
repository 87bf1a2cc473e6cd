"""The tokenizer of a GGUF file: the tokenizer.ggml.* keys as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from typing import Any

from kvanta.errors import InputError
from kvanta.gguf_convert.metadata import Metadata
from kvanta.gguf_convert.pre_tokenizers import PRE_TOKENIZERS
from kvanta.gguf_convert.tokenizer import CONTROL, byte_level_bpe, merges_by_order, sentencepiece_bpe
from kvanta.tokenizer_files.merges import check_token_sizes

# Control tokens that end a text or a turn, whatever eos_token_id says (llama.cpp has the same rule).
_ENDINGS = {
    "<|endoftext|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<|eot|>",
    "<|return|>",
    "<|call|>",
    "<|user|>",
    "<|observation|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}


class Vocabulary:
    """Tokens, special ids and the description of the tokenizer. Raises InputError that names the file."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self.tokens: list[str] = metadata.array("tokenizer.ggml.tokens", str)
        count = len(self.tokens)
        check_token_sizes(metadata.path, self.tokens)
        self.types: list[int] = metadata.array("tokenizer.ggml.token_type", int, count)
        self.bos = metadata.token_id("tokenizer.ggml.bos_token_id", count)
        self.eos = metadata.token_id("tokenizer.ggml.eos_token_id", count)
        self.unknown = metadata.token_id("tokenizer.ggml.unknown_token_id", count)
        self.padding = metadata.token_id("tokenizer.ggml.padding_token_id", count)
        end_of_turn = metadata.token_id("tokenizer.ggml.eot_token_id", count)
        self.endings = [token for token in (self.eos, end_of_turn) if token is not None]
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind == CONTROL and token in _ENDINGS:
                self.endings.append(index)
        self.endings = list(dict.fromkeys(self.endings))
        self.add_bos = False
        self.tokenizer = self._tokenizer()

    def _tokenizer(self) -> dict[str, Any]:
        metadata, count = self._metadata, len(self.tokens)
        model = metadata.text("tokenizer.ggml.model")
        if model not in ("gpt2", "llama"):
            raise InputError(f"{metadata.path} has the tokenizer {model!r}; known: gpt2 (byte-level BPE), llama (BPE)")
        pre = metadata.text("tokenizer.ggml.pre", "default")
        known = PRE_TOKENIZERS.get(pre)
        if model == "gpt2" and known is None:
            names = ", ".join(sorted(PRE_TOKENIZERS))
            raise InputError(f"{metadata.path}: GGUF pre-tokenizer {pre!r} is not known; known: {names}")
        adds_bos = model == "llama" or (known is not None and known.adds_bos)
        self.add_bos = metadata.flag("tokenizer.ggml.add_bos_token", adds_bos)
        prefix = self.bos if self.add_bos else None
        try:
            if model == "gpt2":
                if pre == "kimi-k2" and metadata.value("tokenizer.ggml.merges") is None:
                    merges = merges_by_order(self.tokens, self.types)
                else:
                    merges = metadata.array("tokenizer.ggml.merges", str)
                return byte_level_bpe(self.tokens, self.types, merges, pre, prefix)
            return sentencepiece_bpe(
                self.tokens,
                self.types,
                metadata.array("tokenizer.ggml.scores", float, count),
                0 if self.unknown is None else self.unknown,
                prefix,
                metadata.flag("tokenizer.ggml.add_space_prefix", True),
            )
        except InputError as error:
            named = str(error).startswith(str(metadata.path))
            raise error if named else InputError(f"{metadata.path}: {error}") from None

    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json."""
        special = {"bos_token": self.bos, "eos_token": self.eos, "unk_token": self.unknown, "pad_token": self.padding}
        named = {name: self.tokens[token] for name, token in special.items() if token is not None}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.add_bos,
            "clean_up_tokenization_spaces": False,
            **named,
        }

    def special_ids(self) -> dict[str, Any]:
        """Ids for config.json and generation_config.json; absent ones are left out."""
        ids = {"bos_token_id": self.bos, "eos_token_id": self.endings or None, "pad_token_id": self.padding}
        return {name: value for name, value in ids.items() if value is not None}
