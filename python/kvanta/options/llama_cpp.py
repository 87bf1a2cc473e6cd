"""Options of llama.cpp's programs: what those of llama-server mean here, and what to give instead of others.

The most similar name here would mislead.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from kvanta.errors import InputError
from kvanta.params.checks import one_line


class _Advice(NamedTuple):
    flags: str
    """llama.cpp's, separated by spaces."""
    ours: str
    """The option that is given instead: a command without it has no advice. Empty: none is needed."""
    text: str
    """Advice, in which {value} is replaced by the option's value."""


_ADVICE: tuple[_Advice, ...] = (
    _Advice("-m --model", "--model", "give the file as MODEL: {prog} {value}"),
    _Advice("-hf -hfr --hf-repo", "--model", "give it as MODEL: {prog} {value}"),
    _Advice(
        "-hff --hf-file -mu --model-url",
        "--model",
        "give ORGANIZATION/MODEL:QUANTIZATION as MODEL, such as ORG/MODEL-GGUF:Q4_K_M, or a file: {prog} FILE.gguf",
    ),
    _Advice("-c --ctx-size", "--max-model-len", "give --max-model-len {value}, the context of one sequence"),
    _Advice("-np --parallel", "--max-num-seqs", "give --max-num-seqs {value}"),
    _Advice("--predict --n-predict", "--max-tokens", "give --max-tokens {value}"),
    _Advice("--predict --n-predict", "", "a request's max_tokens limits its text"),
    _Advice("-b --batch-size -ub", "--max-num-batched-tokens", "give --max-num-batched-tokens {value}"),
    _Advice("-t -tb --threads-batch", "--threads", "give --threads {value}"),
    _Advice("-s", "--seed", "give --seed {value}"),
    _Advice(
        "-fa --flash-attn -cb --cont-batching --jinja --embedding --embeddings --rerank --reranking --metrics",
        "",
        "it is always on here; leave it out",
    ),
    _Advice(
        "--mlock --no-mmap --mmap --no-warmup --numa -kvu --kv-unified --swa-full --no-context-shift -dt "
        "--defrag-thold --cache-reuse --no-webui --webui --threads-http -nocb --no-cont-batching --props --perf "
        "--no-perf -dio --direct-io",
        "",
        "there is nothing to choose here; leave it out",
    ),
    _Advice("--cache-ram -cram", "--kv-cache-memory-bytes", "give --kv-cache-memory-bytes, prefixes included"),
    _Advice("--slot-save-path", "--kv-cache-dir", "give --kv-cache-dir {value}, where prefixes are found again"),
    _Advice("--models-dir --models-preset", "--models", "give --models FILE, which lists the models and their options"),
    _Advice("--models-max", "--memory-budget", "give --memory-budget, the memory that all models may take"),
    _Advice("--slots", "", "GET /metrics has the number of running sequences"),
    _Advice("-a --alias", "--served-model-name", "give --served-model-name {value}"),
    _Advice("--api-key-file", "--api-key", "give --api-key, or set KVANTA_API_KEY"),
    _Advice("-to --timeout", "--request-timeout", "give --request-timeout {value}"),
    _Advice("-lv --log-verbosity -v --verbose --log-verbose", "--log-level", "give --log-level debug"),
    _Advice("--log-disable", "--log-level", "give --log-level error --no-log-requests"),
    _Advice("--chat-template-file", "--chat-template", "give --chat-template {value}"),
    _Advice("--reasoning-format", "--reasoning-parser", "give --reasoning-parser with the model's format"),
    _Advice("--reasoning-budget", "", "a request's thinking_token_budget limits its reasoning"),
    _Advice(
        "-md --model-draft --spec-draft-model",
        "--speculative-config",
        'give --speculative-config \'{{"method": "draft_model", "model": "{value}"}}\'',
    ),
    _Advice(
        "--draft --draft-n --draft-max --spec-draft-n-max",
        "--speculative-config",
        "give --speculative-config with num_speculative_tokens {value}",
    ),
    _Advice("-j --json-schema -jf --json-schema-file", "", "a request's response_format has its schema"),
    _Advice("--grammar --grammar-file", "", "a request's structured_outputs has its grammar (GBNF)"),
    _Advice("--temp", "--temperature", "give --temperature {value}"),
    _Advice("--repeat-penalty", "--repetition-penalty", "give --repetition-penalty {value}"),
    _Advice(
        "--temp --top-k --top-p --min-p --repeat-penalty",
        "--override-generation-config",
        "give --override-generation-config, such as '{{\"temperature\": 0.7}}'",
    ),
    _Advice("-p --prompt -f --file", "--raw", "give the prompt after MODEL, or on standard input"),
    _Advice("-cnv -no-cnv -i", "", "kvanta chat converses, kvanta generate does not"),
    _Advice("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale", "", "edit the model's config.json"),
    _Advice("--lora --lora-scaled", "", "LoRA adapters are not supported; merge them into the weights"),
    _Advice("-mm --mmproj -mmu --mmproj-url", "", "models of pictures and sound are not supported"),
    _Advice(
        "-sm --split-mode -ts --tensor-split -mg --main-gpu -cmoe --cpu-moe -ncmoe --n-cpu-moe -ot "
        "--override-tensor -nkvo --no-kv-offload",
        "--device",
        "--device cuda has the whole model on a GPU, or on several with --tensor-parallel-size; --device cpu uses none",
    ),
)
_CACHE_TYPES = {"-ctk": "k", "--cache-type-k": "k", "-ctv": "v", "--cache-type-v": "v"}
# llama.cpp's names of cache types; formats of no more bits.
_FORMATS = {
    "f32": "fp32",
    "f16": "fp16",
    "bf16": "bf16",
    "q8_0": "int8_g32",
    "q5_1": "int5_g32",
    "q5_0": "int5_g32",
    "q4_1": "int4",
    "q4_0": "int4",
    "iq4_nl": "int4",
}
_GPU_LAYERS = ("-ngl", "--gpu-layers", "--n-gpu-layers")
_DEVICES = ("-dev", "--device")


# llama-server's options -> those of the same meaning.
_SAME: Mapping[str, str] = {
    "-m": "--model",
    **dict.fromkeys(("-np", "--parallel"), "--max-num-seqs"),
    **dict.fromkeys(("-b", "--batch-size"), "--max-num-batched-tokens"),
    **dict.fromkeys(("-t", "-tb", "--threads-batch"), "--threads"),
    **dict.fromkeys(("-a", "--alias"), "--served-model-name"),
    **dict.fromkeys(("-to", "--timeout"), "--request-timeout"),
    "--chat-template-file": "--chat-template",
    "--slot-save-path": "--kv-cache-dir",
}
_CONTEXT = ("-c", "--ctx-size")
# Options without a counterpart, since there is nothing to choose; the value is left out with them.
_WITHOUT_VALUE = (
    *("--jinja", "-cb", "--cont-batching", "--embedding", "--embeddings", "--rerank", "--reranking", "--metrics"),
    *("--slots", "--props", "--mlock", "--no-mmap", "--mmap", "--no-warmup", "-kvu", "--kv-unified", "--swa-full"),
    *("--no-context-shift", "--no-webui", "--webui", "--perf", "--no-perf"),
)
_WITH_VALUE = ("-ub", "--ubatch-size", "--numa", "--threads-http", "--cache-reuse")
_FLASH = ("-fa", "--flash-attn")
# Options of sampling -> keys of generation_config.json, which has defaults of requests.
_SAMPLING: Mapping[str, str] = {
    **dict.fromkeys(("--n-predict", "--predict"), "max_new_tokens"),
    "--temp": "temperature",
    "--top-k": "top_k",
    "--top-p": "top_p",
    "--min-p": "min_p",
    "--repeat-penalty": "repetition_penalty",
}
_OVERRIDE = "--override-generation-config"
_HUB = ("-hf", "-hfr", "--hf-repo")


def rewritten(words: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Words with llama-server's options as ours, and the options that have been left out.

    `known`: flags of the command, which keep their own meaning.
    """
    found: list[str] = []
    left_out: list[str] = []
    sampling: dict[str, float] = {}
    slots = next((_given(words, at)[1] for at, word in enumerate(words) if word in ("-np", "--parallel")), "")
    unified = "-kvu" in words or "--kv-unified" in words
    index = 0
    while index < len(words):
        word = words[index]
        flag, equals, _ = word.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        value = _given(words, index)[1]
        takes = 1 if equals else 2  # words of an option with its value
        index += 1
        if flag in known or word in known or not flag.startswith("-"):
            found.append(word)
        elif flag in _CACHE_TYPES:
            if "--kv-cache-dtype" not in found:
                found += ["--kv-cache-dtype", _scheme(words)]
            index += takes - 1
        elif flag in _SAMPLING:
            number = _number(words, index - 1)
            if flag not in ("--n-predict", "--predict") or number >= 0:  # less: as many as there is room for
                sampling[_SAMPLING[flag]] = number
            index += takes - 1
        elif flag in _HUB:  # without a quantization the usual one, as llama-server takes it
            found += ["--model", value if ":" in value.rpartition("/")[2] else f"{value}:latest"]
            index += takes - 1
        elif flag in _SAME:
            found += [_SAME[flag], value]
            index += takes - 1
        elif flag in _CONTEXT:
            count = int(slots) if slots.isdecimal() and int(slots) > 0 and not unified else 1
            if value.isdecimal() and int(value) > 0:  # 0: the model's limit; slots share the context
                found += ["--max-model-len", str(int(value) // count)]
            else:
                left_out.append(flag)
            index += takes - 1
        elif flag in _GPU_LAYERS:
            found += ["--device", "cpu"] if value == "0" else []  # more than none: as many as there are
            left_out += [] if value == "0" else [flag]
            index += takes - 1
        elif flag in _WITH_VALUE or (flag in _FLASH and value in ("on", "off", "auto", "0", "1")):
            left_out.append(flag)
            index += takes - 1
        elif flag in _WITHOUT_VALUE or flag in _FLASH:
            left_out.append(flag)
        else:
            found.append(word)
    return _with_defaults(found, sampling), left_out


def _number(words: Sequence[str], index: int) -> float:
    """The value of an option, which may be negative. Raises InputError."""
    flag, equals, value = words[index].partition("=")
    value = value if equals else (words[index + 1] if index + 1 < len(words) else "")
    try:
        number = int(value) if re.fullmatch(r"[-+]?\d+", value) else float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{flag} must be a number, got {one_line(value)}")
    return number


def _with_defaults(words: list[str], sampling: Mapping[str, float]) -> list[str]:
    """The words with options of sampling as defaults of requests; those of --override-generation-config go first."""
    if not sampling:
        return words
    at = next((index for index, word in enumerate(words) if word.partition("=")[0].replace("_", "-") == _OVERRIDE), -1)
    if at < 0:
        return [*words, _OVERRIDE, json.dumps(sampling)]
    _, equals, value = words[at].partition("=")
    end = at + (1 if equals else 2)
    given: Any = None
    with contextlib.suppress(ValueError):  # which the option's own check describes
        given = json.loads(value if equals else " ".join(words[at + 1 : end]))
    merged = [_OVERRIDE, json.dumps({**sampling, **given})] if isinstance(given, dict) else words[at:end]
    return [*words[:at], *merged, *words[end:]]


def advice(words: Sequence[str], index: int, known: Sequence[str], prog: str) -> str:
    """The message on words[index], the beginning of an unknown option; empty where it is not llama.cpp's.

    `known`: the flags of the command `prog`.
    """
    flag, value = _given(words, index)
    if flag in _CACHE_TYPES and "--kv-cache-dtype" in known:
        return f"give --kv-cache-dtype {_scheme(words)}"
    if flag in (*_GPU_LAYERS, *_DEVICES) and "--device" in known:
        return f"give --device {'cpu' if value in ('0', 'none') else 'cuda'}, for all layers"
    for each in _ADVICE:
        if flag in each.flags.split() and (not each.ours or each.ours in known):
            if value == "0" and each.ours == "--max-model-len":
                return "leave it out: the default is the model's limit"
            return each.text.format(value=value or "VALUE", prog=prog)
    return ""


def _given(words: Sequence[str], index: int) -> tuple[str, str]:
    """The flag, and its value if it has one."""
    flag, equals, value = words[index].partition("=")
    flag = flag.replace("_", "-")
    following = words[index + 1] if index + 1 < len(words) else ""
    return flag, value if equals or following.startswith("-") else following


def _scheme(words: Sequence[str]) -> str:
    """The cache types of K and V as one scheme."""
    sides = {"k": "bf16", "v": "bf16"}
    for index in range(len(words)):
        flag, value = _given(words, index)
        if flag in _CACHE_TYPES:
            sides[_CACHE_TYPES[flag]] = _FORMATS.get(value.lower(), "FORMAT")
    return sides["k"] if len(set(sides.values())) == 1 else f"k={sides['k']},v={sides['v']}"
