"""Default sampling parameters of a model: generation_config.json and its override, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvanta.errors import InputError
from kvanta.files.json_file import read_json_file
from kvanta.params.checks import one_line
from kvanta.params.sampling_params import SamplingParams

AUTO = "auto"
NOTHING = ("kvanta", "vllm", "none")
# Names in generation_config.json -> fields of SamplingParams.
FIELDS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_FILE = "generation_config.json"


def default_sampling(model: Path, source: str, override: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams for requests that do not give them.

    `source`: AUTO for the file in the model's folder, if there is one; a name of NOTHING; else a folder, or the file.
    `override`: names of FIELDS, which replace those of the file; None removes one. Raises InputError.
    """
    unknown = sorted(map(str, override.keys() - FIELDS.keys()))
    if unknown:
        raise InputError(f"override_generation_config has {one_line(unknown[0])}; known: {', '.join(FIELDS)}")
    file = _file_of(model, source)
    stored = {} if file is None else read_json_file(file, dict)
    values = {name: value for name, value in stored.items() if name in FIELDS}
    if stored.get("do_sample") is False and values.get("top_p") == 0:
        del values["top_p"]  # transformers does not look at it
    given = {FIELDS[name]: value for name, value in {**values, **override}.items() if value is not None}
    try:
        params = SamplingParams(**given)
    except InputError as error:
        sources = ([str(file)] if file is not None else []) + (["override_generation_config"] if override else [])
        where = " and ".join(sources)
        raise InputError(f"{where}: {error}; --generation-config kvanta takes no defaults from a file") from None
    return {name: getattr(params, name) for name in FIELDS.values() if name in given}


def describe(defaults: Mapping[str, Any]) -> str:
    """One line for the log."""
    return ", ".join(f"{name} {value}" for name, value in defaults.items())


def _file_of(model: Path, source: str) -> Path | None:
    if source.lower() in NOTHING:
        return None
    if source == AUTO:
        file = model / _FILE
        return file if file.is_file() else None
    file = Path(source).expanduser()
    if file.is_dir():
        file /= _FILE
    if not file.is_file():
        raise InputError(
            f"generation_config is {one_line(source)}, where there is no {_FILE}: give a folder that has one, the "
            f"file itself, {AUTO} (the model's own), or kvanta (none)"
        )
    return file
