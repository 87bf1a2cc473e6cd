"""`kvanta eval`: what each cache format does to a model's predictions."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvanta.cli.arguments import (
    CommandParser,
    ListOption,
    add_engine_options,
    add_model,
    engine_arguments,
    formats_of,
    model_of,
    real_number,
    whole_number,
)
from kvanta.cli.help_page import less_common
from kvanta.cli.report import add_json, output_file, write_json_file, write_report
from kvanta.errors import InputError
from kvanta.evaluate import TASKS, Evaluation, Settings
from kvanta.evaluate.held_out import against_uniform, line_of
from kvanta.evaluate.plot import check_plot, write_plot
from kvanta.evaluate.recommend import parse_conditions, recommend
from kvanta.evaluate.search import Found, Search, about
from kvanta.evaluate.table import EvaluationTable
from kvanta.options.engine import by_name
from kvanta.options.scheme_file import is_scheme_file, write_scheme_file

_EVERY = "all"  # in place of the names of formats

_DESCRIPTION = """\
Effect of each cache format on a model: its predictions on a text against those of the bf16 cache, computed by this
engine on really quantized pages. The reference is computed once and kept in $KVANTA_HOME/eval.

  kvanta eval smollm2
  kvanta eval smollm2 --formats int8 'k=int8,v=int4' int4 --text my.txt --context 8192 --plot eval.png
  kvanta eval smollm2 --formats bf16 --weight-dtype int4 --reference-weights bf16
  kvanta eval smollm2 --recommend "kl_mean<0.005,top1>0.95"
  kvanta eval smollm2 --search 4.5 --scheme mixed.json    then: kvanta generate smollm2 --kv-cache-dtype mixed.json"""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta eval", description=_DESCRIPTION)
    add_model(result)
    result.add_argument(
        "--formats",
        nargs="+",
        action=ListOption,
        metavar="FORMAT",
        help="formats, schemes or scheme files, or all [all quantized ones; of --recommend, those to try first]",
    )
    result.add_argument("--text", metavar="FILE", help="text to predict [a shipped one: Treasure Island]")
    result.add_argument(
        "--context", type=whole_number, metavar="N", help="tokens of a window [2048 or the model's limit]"
    )
    result.add_argument(
        "--tokens",
        type=whole_number,
        metavar="N",
        help=f"tokens of the text in all windows, or those that it has [{Settings.tokens}]",
    )
    result.add_argument(
        "--levels",
        type=real_number,
        nargs="+",
        action=ListOption,
        default=[],
        metavar="PERCENT",
        help="with --kv-cache-floor: share of the pages of a window's first half, oldest first, that are demoted [0]",
    )
    result.add_argument(
        "--reference", default="bf16", metavar="FORMAT", help="format that the others are compared with [bf16]"
    )
    result.add_argument(
        "--reference-weights",
        metavar="DTYPE",
        help="weight_dtype of the reference, to see what --weight-dtype does [the same]",
    )
    result.add_argument(
        "--plot", type=output_file, metavar="FILE", help="draw accuracy over size into FILE, as .png, .svg or .pdf"
    )
    result.add_argument(
        "--recommend",
        metavar="CONDITIONS",
        help="name the smallest format that holds them, as in 'kl_mean<0.005,top1>0.97'",
    )
    add_json(result)
    _add_tasks(result)
    _add_search(result)
    add_engine_options(result, defaults={"max_num_seqs": "1, or 4 with --tasks generation"})
    return result


def _add_tasks(result: CommandParser) -> None:
    tasks = result.group("tasks", "predictions of a text, hidden facts, greedy answers")
    tasks.add_argument(
        "--tasks",
        nargs="+",
        action=ListOption,
        choices=TASKS,
        default=["kl"],
        metavar="TASK",
        help=f"{' '.join(TASKS)} [kl]",
    )
    less_common(
        tasks.add_argument(
            "--depths",
            type=real_number,
            nargs="+",
            action=ListOption,
            default=[0, 25, 50, 75, 100],
            metavar="PERCENT",
            help="where needles are hidden [0 25 50 75 100]",
        )
    )
    less_common(
        tasks.add_argument("--needles", type=whole_number, default=2, metavar="N", help="facts per depth, 1 to 4 [2]")
    )
    less_common(
        tasks.add_argument(
            "--generation-tokens",
            type=whole_number,
            default=256,
            metavar="N",
            help="maximum tokens of each greedy answer [256]",
        )
    )


def _add_search(result: CommandParser) -> None:
    search = result.group("search", "a separate scheme for every layer and side")
    search.add_argument(
        "--search",
        type=real_number,
        nargs="+",
        action=ListOption,
        metavar="BITS",
        help="find a scheme per layer and side of at most BITS per element; several share their measurements",
    )
    search.add_argument(
        "--scheme",
        type=output_file,
        default="scheme.json",
        metavar="FILE",
        help="output file of --search; with several BITS, scheme-BITS.json [scheme.json]",
    )
    less_common(
        search.add_argument(
            "--search-tokens",
            type=whole_number,
            default=1024,
            metavar="N",
            help="tokens of text that --search reads [1024]",
        )
    )
    less_common(
        search.add_argument(
            "--search-formats",
            nargs="+",
            action=ListOption,
            metavar="FORMAT",
            help="candidates of --search, in addition to bf16 [all]",
        )
    )
    less_common(
        search.add_argument(
            "--search-modifiers",
            default="",
            metavar="MODIFIERS",
            help="modifiers of every scheme of --search, such as +exact=2; +query goes to the keys that take it",
        )
    )


def _settings(values: argparse.Namespace) -> Settings:
    engine = engine_arguments(values)
    formats = formats_of(values, engine)
    engine.pop("enable_prefix_caching", None)  # eval needs it, and no bit depends on it
    longest = engine.pop("max_model_len", None)
    context = values.context
    if context is None and longest is not None:
        context = by_name()["max_model_len"].read(longest)
    every = formats == [_EVERY]
    return Settings(
        formats=None if every else formats,
        recommended=values.recommend is not None and not every,
        text=values.text,
        context=context,
        tokens=Settings.tokens if values.tokens is None else values.tokens,
        levels=[share / 100 for share in values.levels],
        reference=values.reference,
        reference_weights=values.reference_weights,
        tasks=values.tasks,
        depths=[depth / 100 for depth in values.depths],
        needles=values.needles,
        generation_tokens=values.generation_tokens,
        engine=engine,
    )


def _title(evaluation: Evaluation) -> str:
    report = evaluation.report()
    parts = [report["model"]]
    if report["tokens"]:
        parts.append(f"{report['tokens']:,} tokens of {report['text']} in windows of {report['context']:,}")
    weights = "" if report["reference_weights"] is None else f" with {report['reference_weights']} weights"
    parts.append(f"against {report['reference']}{weights}")
    if report["reference_ppl"] is not None:
        parts[-1] += f" of perplexity {report['reference_ppl']:.3f}"
    figures = report["reference_figures"]
    if "needle" in figures:
        parts[-1] += f", which finds {figures['needle']:.0%} of the needles"
    if "generation" in figures:
        parts[-1] += f" and answers with {figures['generation']['tokens']} tokens"
    return "; ".join(parts)


def _measure(evaluation: Evaluation, to_terminal: bool, keep: Callable[[], None]) -> bool:
    """Prints the table line by line, and calls `keep` after each. False if the user has stopped it after the first."""
    names = list(evaluation.names())
    table = EvaluationTable(names, evaluation.settings.tasks)
    complete = True
    evaluation.prepare()
    if to_terminal:
        print(f"{_title(evaluation)}\n\n{table.header()}", flush=True)
    begin = time.perf_counter()
    try:
        for name, row in evaluation.run():
            keep()
            if len(evaluation.rows) == 1 < len(names):
                print(f"kvanta: {_estimate(len(names), time.perf_counter() - begin)}", file=sys.stderr)
            if to_terminal:
                print(table.row(name, row), flush=True)
    except KeyboardInterrupt:
        if not evaluation.rows:
            raise
        complete = False
    if to_terminal:
        print(f"\n{table.footer(evaluation.report()['ci95_over'])}")
        notes = {note: None for row in evaluation.rows.values() for note in row["notes"]}
        for note in notes:
            print(f"kvanta: {note}", file=sys.stderr)
    return complete


def _estimate(formats: int, seconds: float) -> str:
    """`seconds`: of the first format."""
    whole = formats * seconds
    length = f"{whole:.0f} seconds" if whole < 90 else f"{whole / 60:.0f} minutes"
    return f"{formats} formats, about {length}"


def _search(evaluation: Evaluation, values: argparse.Namespace, to_terminal: bool) -> dict[str, Found]:
    """Writes scheme files, by whose names it returns them, and has them and the best uniform schemes measured."""
    if not is_scheme_file(values.scheme):
        raise InputError(f"--scheme: {values.scheme!r} does not end in .json")
    passages = evaluation.calibration_passages(values.search_tokens)
    choices = (values.search, values.search_formats, values.search_modifiers)
    schemes = Search(evaluation.factory, passages, *choices).run()
    stem = values.scheme[: -len(".json")]
    result = {values.scheme if len(schemes) == 1 else f"{stem}-{each.budget:g}.json": each for each in schemes}
    for file, found in result.items():
        write_scheme_file(file, found.layers, about(found, evaluation.factory.model, passages))
        if to_terminal:
            print(f"{file}: {found.bits_per_element:.4g} bits per element")
    if to_terminal:
        print()
    uniform = [found.uniform for found in schemes if found.uniform is not None]
    evaluation.formats = list(dict.fromkeys([*evaluation.formats, *result, *uniform]))
    return result


def _about_search(found: Mapping[str, Found], rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"file": file, **dataclasses.asdict(each), "held_out": against_uniform(rows, file, each.budget)}
        for file, each in found.items()
    ]


def _serve_command(model: str, name: str) -> str:
    from kvanta.cli import COMMANDS

    command = "serve" if "serve" in COMMANDS else "generate"
    return shlex.join(["kvanta", command, model, "--kv-cache-dtype", name])


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    settings = _settings(values)
    if settings.levels and (values.recommend is not None or values.search is not None):
        raise InputError("--levels: not together with --recommend or --search, which are of formats")
    conditions = parse_conditions(values.recommend) if values.recommend is not None else None
    if values.plot is not None:
        check_plot(values.plot, settings.tasks)
    evaluation = Evaluation(model_of(values), settings)
    to_terminal = values.json != "-"
    found = {} if values.search is None else _search(evaluation, values, to_terminal)
    if values.tokens is not None and 0 < evaluation.text_tokens < values.tokens:
        print(f"kvanta: --tokens is {values.tokens}; the text has {evaluation.text_tokens} tokens", file=sys.stderr)

    def report_of(interrupted: bool) -> dict[str, Any]:
        result = {**evaluation.report(), "interrupted": interrupted}
        if found:
            result["search"] = _about_search(found, evaluation.rows)
        return result

    def keep() -> None:
        if values.json is not None and to_terminal:
            write_json_file(values.json, report_of(interrupted=True))  # should the process be killed

    complete = _measure(evaluation, to_terminal, keep)
    report = report_of(interrupted=not complete)
    compared = [each for each in report.get("search", []) if each["held_out"] is not None]
    if to_terminal and compared:
        print("\n" + "\n".join(line_of(each["file"], each["budget"], each["held_out"]) for each in compared))
    if conditions is not None:
        best = recommend(evaluation.rows, conditions)
        command = None if best is None else _serve_command(evaluation.factory.model, best)
        report["recommended"] = {"conditions": values.recommend, "format": best, "command": command}
        if to_terminal:
            none = f"no format holds {values.recommend}"
            print("\n" + (none if best is None else f"{values.recommend}: {best}\n  {command}"))
    if not to_terminal:
        write_report("-", report, "")
    elif values.json is not None:
        write_json_file(values.json, report)
    if values.plot is not None:
        write_plot(values.plot, report)
    if not complete:
        raise KeyboardInterrupt
    return 0
