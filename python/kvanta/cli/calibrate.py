"""`kvanta calibrate`: scales, key means, query-aware matrices and outlier channels of a model, from a text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvanta.checkpoint.resolve import resolve_model
from kvanta.cli.arguments import (
    CommandParser,
    add_engine_options,
    add_model,
    engine_arguments,
    model_of,
    real_number,
    whole_number,
)
from kvanta.cli.report import add_json, output_file, write_report
from kvanta.errors import InputError, reason_of
from kvanta.options.scheme_file import read_layer_schemes
from kvanta.terminal.tables import render_table

_DESCRIPTION = """\
Static scales for an fp8 cache, matrices for +query and key means for +mean, measured on a text through the model's own
prefill.

  kvanta calibrate smollm2 --out scales.json --key-mean
  kvanta generate smollm2 "Once" --kv-cache-dtype fp8 --quantization-param-path scales.json
  kvanta calibrate smollm2 --query --text my.txt --out query.safetensors
  kvanta generate smollm2 "Once" --kv-cache-dtype int4+query --quantization-param-path query.safetensors
  kvanta calibrate ./model --granularity head --method mse --save-checkpoint ./model-fp8"""
_MOST_TOKENS = 16384
_WINDOW = 2048


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta calibrate", description=_DESCRIPTION)
    add_model(result)
    result.add_argument(
        "--text", metavar="FILE", help="text to read, UTF-8 [included texts: prose, code, languages, chats]"
    )
    result.add_argument(
        "--tokens", type=whole_number, metavar="N", help=f"read the first N of it [all, at most {_MOST_TOKENS:,}]"
    )
    result.add_argument(
        "--granularity", choices=["tensor", "head"], default="tensor", help="a scale per layer, or per KV head [tensor]"
    )
    result.add_argument(
        "--method",
        choices=["amax", "percentile", "mse"],
        default="amax",
        help="no value saturates, few do, or least squared error [amax]",
    )
    result.add_argument(
        "--percentile", type=real_number, default=99.99, metavar="P", help="percentile of --method percentile [99.99]"
    )
    result.add_argument(
        "--headroom",
        type=real_number,
        default=2.0,
        metavar="X",
        help="factor by which other texts may exceed the largest value, with --method amax [2]",
    )
    result.add_argument("--key-mean", action="store_true", help="also the mean of every channel of K, for +mean")
    result.add_argument(
        "--query",
        action="store_true",
        help="also a matrix per layer and KV head that knows keys and queries, for +query; --out is FILE.safetensors",
    )
    result.add_argument(
        "--outliers", type=whole_number, default=0, metavar="N", help="also the N channels of K with the largest values"
    )
    result.add_argument(
        "--outliers-by", choices=["amax", "variance"], default="amax", help="measure of a channel's size [amax]"
    )
    result.add_argument(
        "--out", type=output_file, metavar="FILE", help="write a scale file, for --quantization-param-path"
    )
    result.add_argument(
        "--save-checkpoint", metavar="FOLDER", help="write a copy of the model with its scales, as vLLM reads them"
    )
    result.add_argument(
        "--layer-schemes",
        metavar="FILE",
        help="declare the schemes of this file of `kvanta eval --search` in the copy, as ModelOpt does [fp8]",
    )
    add_json(result)
    add_engine_options(result, defaults={"max_num_seqs": 1})
    return result


def _text(report: dict[str, Any]) -> str:
    rows = [
        [
            str(row["layer"]),
            f"{row['k_amax']:.4g}",
            f"{row['k_scale_max']:.4g}",
            f"{row['k_mean_share']:.0%}",
            f"{row['v_amax']:.4g}",
            f"{row['v_scale_max']:.4g}",
        ]
        for row in report["layers"]
    ]
    title = (
        f"{report['model']}: {report['tokens']:,} tokens in windows of {report['window']:,}, {report['method']} per "
        f"{report['granularity']}"
    )
    table = render_table(["layer", "K largest", "K scale", "K constant", "V largest", "V scale"], rows)
    notes = [
        "K constant: share of K's squared size that all tokens have in common, in the worst head; +mean removes it."
    ]
    notes += [
        f"{what}: {report[key]}" for key, what in (("out", "scale file"), ("checkpoint", "checkpoint")) if report[key]
    ]
    return "\n".join([title, "", table, "", *notes])


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {str(path)!r}: {reason_of(error)}") from None
    if not text:
        raise InputError(f"{str(path)!r} is empty")
    return text


def _tokens(llm: Any, values: argparse.Namespace) -> list[int]:
    from kvanta.calibration import default_tokens

    tokens: list[int]
    if values.text is None:
        tokens, name = default_tokens(llm.tokenizer), "the included texts"
    else:
        path = Path(values.text).expanduser()
        tokens, name = llm.tokenizer.encode(_read_text(path)), path.name
    if values.tokens is None:
        return tokens[:_MOST_TOKENS]
    if not 1 <= values.tokens <= len(tokens):
        raise InputError(f"--tokens must be in 1..{len(tokens)}, the length of {name}, got {values.tokens}")
    return tokens[: values.tokens]


def _layer_schemes(folder: str, values: argparse.Namespace) -> list[str]:
    """The schemes of --layer-schemes, checked before minutes of reading."""
    from kvanta import _core
    from kvanta.calibration.modelopt import layer_algorithms

    if not values.save_checkpoint:
        raise InputError("--layer-schemes is declared in a copy of the model: give --save-checkpoint FOLDER")
    if values.granularity != "tensor":
        raise InputError(
            f"--layer-schemes has one scale per layer and side: --granularity {values.granularity} has more"
        )
    schemes = read_layer_schemes(values.layer_schemes, int(_core.read_model_info(folder).layers))
    layer_algorithms(schemes)
    return schemes


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    from kvanta.calibration import calibrate, save_checkpoint, write_scale_file
    from kvanta.calibration.checkpoint_copy import check_target
    from kvanta.calibration.scale_file import check_scale_file_name
    from kvanta.llm import LLM

    options = engine_arguments(values)
    for name in ("kv_cache_dtype", "kv_cache_ages", "kv_cache_floor", "quantization_param_path", "calculate_kv_scales"):
        if name in options:
            raise InputError(f"--{name.replace('_', '-')} has no meaning here: calibration reads the exact cache")
    if not (values.out or values.save_checkpoint or values.json):
        raise InputError("nothing to write: give --out FILE, --save-checkpoint FOLDER or --json FILE")
    if values.out:
        check_scale_file_name(values.out, values.query)  # before minutes of reading
    folder = resolve_model(model_of(values))
    schemes = None
    if values.layer_schemes:
        schemes = _layer_schemes(str(folder.path), values)
    if values.save_checkpoint:
        check_target(folder.path, values.save_checkpoint)  # before minutes of reading
    limit = options.pop("max_model_len", None)
    if limit is None:
        from kvanta import _core

        limit = min(_WINDOW, int(_core.read_model_info(str(folder.path)).max_position))
    llm = LLM(folder.path, kv_cache_dtype="bf16", max_model_len=limit, **{"max_num_seqs": 1, **options})
    tokens = _tokens(llm, values)
    found = calibrate(
        llm,
        tokens,
        granularity=values.granularity,
        method=values.method,
        percentile=values.percentile,
        headroom=values.headroom,
        key_mean=values.key_mean,
        outliers=values.outliers,
        outliers_by=values.outliers_by,
        query=values.query,
    )
    if values.out:
        write_scale_file(values.out, found, llm.model_info)
    if values.save_checkpoint:
        save_checkpoint(folder.path, values.save_checkpoint, found, schemes)

    if found.statistics is None:
        raise AssertionError("calibrate() has statistics")
    amax = found.statistics.amax.max(axis=(2, 3))
    constant = found.statistics.mean_shares()[:, 0].max(axis=-1)
    rows = [
        {
            "layer": layer,
            "k_amax": float(amax[layer, 0]),
            "v_amax": float(amax[layer, 1]),
            "k_scale_min": float(found.k_scale[layer].min()),
            "k_scale_max": float(found.k_scale[layer].max()),
            "v_scale_min": float(found.v_scale[layer].min()),
            "v_scale_max": float(found.v_scale[layer].max()),
            "k_mean_share": float(constant[layer]),
        }
        for layer in range(len(amax))
    ]
    report = {
        "model": folder.name,
        "hash": llm.model_info.hash,
        "tokens": found.tokens,
        "window": found.window,
        "granularity": found.granularity,
        "method": found.method,
        "key_mean": found.k_mean is not None,
        "query": found.query is not None,
        "outliers": values.outliers,
        "out": values.out,
        "checkpoint": values.save_checkpoint,
        "layers": rows,
    }
    write_report(values.json, report, _text(report))
    return 0
