"""The facts of a model's files, each with the place that it was read from, for `kvanta show`."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvanta import _core
from kvanta.checkpoint.checks import check_model_folder
from kvanta.checkpoint.end_tokens import EndTokens
from kvanta.checkpoint.generation_config import AUTO, default_sampling
from kvanta.errors import InputError, KvantaError
from kvanta.files.json_file import text_config
from kvanta.terminal.tables import human_bytes
from kvanta.text.tokenizer import Tokenizer
from kvanta.text.tokenizer_files.files import read_json

GGUF_INDEX = "model.gguf.index.json"
_MAX_HEADER = 100_000_000
# Files that belong to a model, and that nothing here reads.
_NOT_READ: Mapping[str, str] = {
    "preprocessor_config.json": "pictures and sound are not read: prompts are text",
    "processor_config.json": "pictures and sound are not read: prompts are text",
    "video_preprocessor_config.json": "videos are not read: prompts are text",
    "adapter_config.json": "adapters are not applied: merge this one into the weights",
    "*.bin": "weights that may run code are not read",
    "*.pth": "weights that may run code are not read",
    "*.onnx": "only *.safetensors and GGUF files are read",
    "*.py": "code of a checkpoint is never run",
}
_ALWAYS = {"messages", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "range", "loop"}


@dataclass(frozen=True)
class Fact:
    """`source`: the file, and the key in it."""

    name: str
    value: str
    source: str = ""


@dataclass
class ModelFacts:
    """Facts of a folder's files. A stage that fails leaves its problem, and the others go on."""

    info: _core.ModelInfo | None = None
    facts: list[Fact] = field(default_factory=list)
    ignored: list[Fact] = field(default_factory=list)
    """Files without effect, with the reason as the value."""
    problems: list[str] = field(default_factory=list)
    """Errors that loading, or a request, ends with."""
    loads: bool = True

    def add(self, name: str, value: object, source: str = "") -> None:
        """A fact, unless it is None or an empty text."""
        if value is not None and str(value):
            self.facts.append(Fact(name, str(value), source))

    def attempt(self, stage: Callable[[], None]) -> None:
        """Runs a stage; its error becomes a problem, once."""
        try:
            stage()
        except KvantaError as error:
            self.loads = False
            if str(error) not in self.problems:
                self.problems.append(str(error))


def model_facts(
    folder: Path,
    info: _core.ModelInfo | None = None,
    tokenizer: Tokenizer | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> ModelFacts:
    """Reads a model's folder, in Hugging Face layout or made for a GGUF file; of the weights, headers alone.

    `info`, `tokenizer`, `sampling` (default sampling parameters): those in use, if the model is loaded.
    """
    result = ModelFacts(info)
    result.attempt(lambda: check_model_folder(folder))
    config: dict[str, Any] = {}
    result.attempt(lambda: config.update(read_json(folder / "config.json")))
    result.attempt(lambda: _add_shape(result, folder, config))
    result.attempt(lambda: _add_weights(result, folder, config))
    result.attempt(lambda: _add_texts(result, folder, tokenizer or Tokenizer(folder)))
    result.attempt(lambda: _add_sampling(result, folder, sampling))
    for pattern, reason in _NOT_READ.items():
        result.ignored += [Fact(file.name, reason) for file in sorted(folder.glob(pattern))[:1]]
    return result


def _key(config: Mapping[str, Any], *names: str) -> str:
    """The place of the first of these keys in config.json, that of the text model included."""
    for prefix, part in (("", config), ("text_config.", text_config(config))):
        for name in names:
            if part.get(name) is not None:
                return f"config.json {prefix}{name}"
    return f"the class's default, no {names[0]} in config.json"


def _value(config: Mapping[str, Any], name: str) -> Any:
    return config.get(name, text_config(config).get(name))


def _add_shape(result: ModelFacts, folder: Path, config: Mapping[str, Any]) -> None:
    result.info = info = result.info or _core.read_model_info(str(folder))
    kinds = Counter(info.layer_heads)
    heads = ", ".join(
        (f"{count} of " if len(kinds) > 1 else "") + f"{kv_heads} KV heads of {size}"
        for (kv_heads, size), count in kinds.items()
    )
    result.add("architecture", info.architecture, _key(config, "architectures"))
    result.add("size", f"{info.parameters / 1e6:,.1f} M parameters; {info.layers} layers of {info.hidden}, {heads}")
    if not info.has_lm_head:
        result.add("output matrix", "none: texts are embedded, and none is generated", "no lm_head in the weights")
    result.add("context", f"{info.max_position:,} tokens", _key(config, "max_position_embeddings", "n_positions"))
    dtype = _key(config, "dtype", "torch_dtype")
    result.add("dtype", info.dtype, dtype if dtype.startswith("config.json") else "the weights")
    windows = Counter(window for window in info.sliding_window if window > 0)
    for window, count in windows.items():
        result.add("window", f"{window:,} tokens in {count} of {info.layers} layers", _key(config, "sliding_window"))
    scaling = _value(config, "rope_scaling") or _value(config, "rope_parameters")
    base = _value(config, "rope_theta") or (scaling.get("rope_theta") if isinstance(scaling, Mapping) else None)
    kind = scaling.get("rope_type") or scaling.get("type") if isinstance(scaling, Mapping) else None
    if base is not None or kind is not None:
        parts = [f"base {base:,.10g}" if isinstance(base, int | float) else "", "" if kind is None else str(kind)]
        place = _key(config, "rope_theta", "rope_parameters", "rope_scaling")
        result.add("rope", ", ".join(filter(None, parts)), place)
    declared = info.declared_kv_cache
    place = "hf_quant_config.json" if (folder / "hf_quant_config.json").is_file() else "config.json quantization_config"
    if info.declared_kv_cache_error:
        declared = f"not known ({info.declared_kv_cache_error}): --kv-cache-dtype must choose one"
    result.add("KV cache", declared or "bf16, unless --kv-cache-dtype says otherwise", place if declared else "no file")


def _tensor_types(folder: Path) -> tuple[dict[str, int], str]:
    """Bytes of each type of tensors, and the file, or the number of files. Raises InputError for a broken header."""
    index = read_json(folder / GGUF_INDEX)
    if index:
        types: Counter[str] = Counter(str(tensor.get("type")) for tensor in index["tensors"].values())
        files = [Path(str(part["path"])).name for part in index["files"]]
        return dict(types), files[0] if len(files) == 1 else f"{len(files)} files"
    sizes: dict[str, int] = {}
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        for tensor in _header(path).values():
            begin, end = tensor.get("data_offsets", (0, 0))
            sizes[tensor["dtype"]] = sizes.get(tensor["dtype"], 0) + end - begin
    return sizes, paths[0].name if len(paths) == 1 else f"{len(paths)} files"


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = file.read(8)
        size = struct.unpack("<Q", length)[0] if len(length) == 8 else _MAX_HEADER + 1
        try:
            header = json.loads(file.read(size)) if size <= _MAX_HEADER else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise InputError(f"{path} is no safetensors file: its header cannot be read")
    header.pop("__metadata__", None)
    return header


def _add_weights(result: ModelFacts, folder: Path, config: Mapping[str, Any]) -> None:
    if not any(folder.glob("*.safetensors")) and not (folder / GGUF_INDEX).is_file():
        return
    sizes, source = _tensor_types(folder)
    is_gguf = (folder / GGUF_INDEX).is_file()
    shown = sorted(sizes.items(), key=lambda entry: -entry[1])
    text = ", ".join(f"{name} {f'x {size}' if is_gguf else human_bytes(size)}" for name, size in shown)
    result.add("weights", text, source)
    if result.info is not None:
        result.add("in memory", f"{human_bytes(result.info.weight_bytes)}, computed as {result.info.dtype}")
    method = config.get("quantization_config")
    if isinstance(method, Mapping):
        names = ("quant_method", "bits", "group_size", "fmt", "format", "quant_algo")
        values = [f"{name} {method[name]}" for name in names if isinstance(method.get(name), str | int)]
        result.add("quantization", ", ".join(values), "config.json quantization_config")


def _add_texts(result: ModelFacts, folder: Path, tokenizer: Tokenizer) -> None:
    result.add("tokenizer", f"{len(tokenizer):,} tokens", tokenizer.path.name)
    if result.info is not None and len(tokenizer) > result.info.vocab:
        last, limit = len(tokenizer) - 1, result.info.vocab - 1
        result.problems.append(
            f"tokens above {limit}: the tokenizer has ids up to {last}, the model has no rows for them"
        )
    prompt = tokenizer.encode("a")
    bos = tokenizer.bos_id
    if bos is not None:
        adds = "begins every text" if prompt[:1] == [bos] else "is not added to texts"
        result.add("first token", f"{tokenizer.token_text(bos)} ({bos}) {adds}", tokenizer.place_of("bos_token"))
    _add_ends(result, folder, tokenizer)
    if tokenizer.pattern_file:
        result.add("pattern", "cuts texts in place of the other file's", tokenizer.pattern_file)
    if tokenizer.tokens_without_rows:
        shown = ", ".join(tokenizer.tokens_without_rows)
        result.ignored.append(Fact("special tokens", f"{shown}: the model has no rows for further tokens"))
    for warning in tokenizer.warnings:
        result.add("warning", warning, tokenizer.path.name)
    template = tokenizer.chat_template
    if template is None:
        result.add("chat template", "none: chats are refused, completions work")
        return
    if template.error is not None:
        result.problems.append(str(template.error))
    reads = sorted(template.names - _ALWAYS - set(tokenizer.special_texts))
    variables = [name for name in reads if name in ("tools", "documents") or name.startswith(("enable", "thinking"))]
    about = f"{len(template.source):,} characters"
    about += f", reads {', '.join(variables)}" if variables else ""
    about += "" if "tools" in reads or template.error is not None else "; does not show tools"
    result.add("chat template", about, template.place)
    if tokenizer.tool_template is not None:
        about = f"{len(tokenizer.tool_template.source):,} characters, for chats with tools"
        result.add("tool template", about, tokenizer.tool_template.place)


def _add_ends(result: ModelFacts, folder: Path, tokenizer: Tokenizer) -> None:
    info = result.info
    defaults, rows = ([], len(tokenizer)) if info is None else (info.eos_token_ids, info.vocab)
    ends = EndTokens.read(folder, tokenizer, defaults, rows)
    names = ", ".join(f"{tokenizer.token_text(token)} ({token})" for token in ends.tokens)
    result.add("end tokens", names or "none: texts end at max_tokens", ends.places(ends.tokens))
    if beyond := [token for token in ends.sources if token not in ends.tokens]:
        shown = f"{', '.join(map(str, beyond))} outside the vocabulary"
        result.ignored.append(Fact("end tokens", shown, ends.places(beyond)))


def _add_sampling(result: ModelFacts, folder: Path, used: Mapping[str, Any] | None) -> None:
    stored = default_sampling(folder, AUTO, {})
    found = stored if used is None else used
    text = ", ".join(f"{name} {value}" for name, value in found.items())
    place = "generation_config.json" if found == stored else "--generation-config, --override-generation-config"
    result.add("sampling", text or "temperature 1, no limits", place if found or stored != found else "no file has any")
