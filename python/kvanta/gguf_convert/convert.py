"""A GGUF file becomes a folder in Hugging Face layout, weights in bfloat16. Whole or not at all.

Quantized blocks that linear layers can keep are written as well, for weight_dtype int8 and int4.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kvanta import _core
from kvanta.errors import InputError, ResourceError
from kvanta.gguf_convert.config import hugging_face_config
from kvanta.gguf_convert.metadata import Metadata
from kvanta.gguf_convert.tokenizer import byte_level_bpe, sentencepiece_bpe
from kvanta.gguf_convert.weights import Weights
from kvanta.safetensors_writer import write_safetensors
from kvanta.tokenizer import Tokenizer

# Control tokens that end a text or a turn, whatever eos_token_id says (llama.cpp has the same rule).
_ENDINGS = {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>"}
BLOCK_FILE = "gguf_blocks.kvanta"
_CONTROL = 3
_MOST_TOKEN_BYTES = 4096  # far above every vocabulary; splitting a token at every place takes the square of it


class _Vocabulary:
    """The tokenizer.ggml.* keys."""

    def __init__(self, metadata: Metadata) -> None:
        self.tokens: list[str] = metadata.array("tokenizer.ggml.tokens", str)
        count = len(self.tokens)
        for index, token in enumerate(self.tokens):
            if len(token.encode()) > _MOST_TOKEN_BYTES:
                size = len(token.encode())
                raise InputError(
                    f"{metadata.path}: token {index} has {size} bytes; at most {_MOST_TOKEN_BYTES} are read"
                )
        self.types: list[int] = metadata.array("tokenizer.ggml.token_type", int, count)
        self.bos = metadata.token_id("tokenizer.ggml.bos_token_id", count)
        self.eos = metadata.token_id("tokenizer.ggml.eos_token_id", count)
        self.unknown = metadata.token_id("tokenizer.ggml.unknown_token_id", count)
        self.padding = metadata.token_id("tokenizer.ggml.padding_token_id", count)
        end_of_turn = metadata.token_id("tokenizer.ggml.eot_token_id", count)
        self.endings = [token for token in (self.eos, end_of_turn) if token is not None]
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind == _CONTROL and token in _ENDINGS:
                self.endings.append(index)
        self.endings = list(dict.fromkeys(self.endings))

        model = metadata.text("tokenizer.ggml.model")
        if model not in ("gpt2", "llama"):
            raise InputError(f"{metadata.path} has the tokenizer {model!r}; known: gpt2 (byte-level BPE), llama (BPE)")
        is_llama3 = metadata.text("tokenizer.ggml.pre", "default") in ("llama-bpe", "llama3", "llama-v3")
        self.add_bos = metadata.flag("tokenizer.ggml.add_bos_token", model == "llama" or is_llama3)
        prefix = self.bos if self.add_bos else None
        if model == "gpt2":
            self.tokenizer = byte_level_bpe(
                self.tokens,
                self.types,
                metadata.array("tokenizer.ggml.merges", str),
                metadata.text("tokenizer.ggml.pre", "default"),
                prefix,
            )
        else:
            self.tokenizer = sentencepiece_bpe(
                self.tokens,
                self.types,
                metadata.array("tokenizer.ggml.scores", float, count),
                0 if self.unknown is None else self.unknown,
                prefix,
                metadata.flag("tokenizer.ggml.add_space_prefix", True),
            )

    def tokenizer_config(self) -> dict[str, Any]:
        special = {"bos_token": self.bos, "eos_token": self.eos, "unk_token": self.unknown, "pad_token": self.padding}
        named = {name: self.tokens[token] for name, token in special.items() if token is not None}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.add_bos,
            "clean_up_tokenization_spaces": False,
            **named,
        }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_folder(source: Path, folder: Path) -> None:
    metadata = Metadata(source)
    vocabulary = _Vocabulary(metadata)
    config = hugging_face_config(metadata, len(vocabulary.tokens))
    weights = Weights(metadata, config)

    tied = weights.tied()
    names = [name for name in weights.shapes if not (tied and name == "lm_head.weight")]
    config["tie_word_embeddings"] = tied
    config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in weights and metadata.architecture == "llama"
    config["mlp_bias"] = False
    ids = {
        "bos_token_id": vocabulary.bos,
        "eos_token_id": vocabulary.endings or None,
        "pad_token_id": vocabulary.padding,
    }
    ids = {name: value for name, value in ids.items() if value is not None}
    config.update(ids)

    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "tokenizer.json", vocabulary.tokenizer)
    _write_json(folder / "tokenizer_config.json", vocabulary.tokenizer_config())
    template = metadata.optional_text("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_safetensors(
        folder / "model.safetensors", {name: weights.shapes[name] for name in names}, weights.values(names)
    )
    block_shapes = weights.block_shapes(names)
    if block_shapes:
        write_safetensors(folder / BLOCK_FILE, block_shapes, weights.blocks(block_shapes), "U8")


def _check_folder(source: Path, folder: Path) -> None:
    """Opens what was written, so that nothing is kept that the engine or the tokenizer refuses."""
    try:
        _core.read_model_info(str(folder))
        Tokenizer(folder)
    except InputError as error:
        reason = str(error).replace(f"{folder}/", "")
        raise InputError(f"{source} makes no usable model: {reason}") from None


def convert_gguf(source: str | Path, folder: str | Path) -> Path:
    """Converts the GGUF file `source` to the new folder `folder` and returns it.

    The folder appears complete or not at all; one that two processes make at once is made by the faster.
    Raises InputError for a file that is damaged, hostile or of an unknown kind, or when `folder` has files already.
    """
    source, folder = Path(source).expanduser(), Path(folder).expanduser()
    if not source.is_file():
        raise InputError(f"there is no GGUF file {str(source)!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{str(folder)!r} exists already and is not an empty folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ResourceError(f"cannot write to {str(folder.parent)!r}: {error.strerror}") from None
    try:
        _write_folder(source, work)
        _check_folder(source, work)
        work.chmod(0o755)
        try:
            work.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    except OSError as error:
        raise ResourceError(f"cannot write {str(folder)!r}: {error.strerror}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
