"""The report of `kvanta bench serve` for people, and reports of earlier runs read again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvanta.errors import InputError, reason_of
from kvanta.terminal.tables import render_table

_MOST_BYTES = 1 << 26
_HEADER = ["label", "requests/s", "in flight", "done", "failed", "output tok/s", "all tok/s"]
_LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "end to end"}
_EXTRA = {"cached_tokens": "from cache", "goodput": "goodput"}  # shown where a run has it


def text_of(reports: Sequence[Mapping[str, Any]]) -> str:
    """A table with a row per run, and what the reader should know about them."""
    runs = [(report["label"], run) for report in reports for run in report["runs"]]
    extra = [name for name in _EXTRA if any(run[name] for _, run in runs)]
    header = [
        *_HEADER,
        *(f"{name} p50/p99 ms" for name in _LATENCIES.values()),
        *(title for name, title in _EXTRA.items() if name in extra),
    ]
    rows = [_cells(label, run, extra) for label, run in runs]
    table = render_table(header, rows)
    return "\n".join([_title(reports[0]), "", table, *(note for report in reports for note in _notes(report))])


def _title(report: Mapping[str, Any]) -> str:
    work = report["workload"]
    if work["kind"] == "synthetic":
        lengths = f"about {work['input_len']:,} tokens in, {work['output_len']:,} out"
        lengths += f", after {work['shared_prefix_len']:,} shared ones" if work["shared_prefix_len"] else ""
    else:
        lengths = f"the trace {work['file']} ({work['kind']})"
    return f"{report['model']} at {report['url']}: {lengths}"


def _cells(label: str, run: Mapping[str, Any], extra: Sequence[str]) -> list[str]:
    cells = [
        label,
        "all at once" if run["rate"] is None else f"{run['rate']:.4g}",
        str(run["peak_concurrency"]),
        f"{run['completed']:,}",
        f"{run['failed']:,}",
        f"{run['output_throughput']:,.1f}",
        f"{run['total_throughput']:,.1f}",
    ]
    for name in _LATENCIES:
        figures = run[name]
        cells.append(f"{figures['p50']:,.1f} / {figures['p99']:,.1f}" if figures else "-")
    if "cached_tokens" in extra:
        cells.append(f"{run['cached_tokens'] / max(1, run['input_tokens']):.0%}")
    if "goodput" in extra:
        goodput = run["goodput"]
        cells.append(f"{goodput['request_throughput']:.3g}/s ({goodput['share']:.0%})" if goodput else "-")
    return cells


def _notes(report: Mapping[str, Any]) -> list[str]:
    """Caveats of the figures."""
    notes = []
    if report["prompts"] == "text":
        notes.append("the server was given text: lengths of prompts are approximately the requested ones")
    if not report["exact_lengths"]:
        notes.append("the server takes no ignore_eos: answers may be shorter than requested")
    for run in report["runs"]:
        short, lag = run["short_answers"], run["generator_lag_ms"]["p99"]
        if short:
            notes.append(f"{short:,} of {run['completed']:,} answers were shorter than requested")
        if lag > 100:
            notes.append(f"the load generator itself was late by {lag:,.0f} ms (p99): the machine has no time for it")
        for kind, error in run["errors"].items():
            notes.append(f"{error['count']:,} x {kind}: {error['example']}")
    lines = dict.fromkeys(f"{report['label']}: {note}" for note in notes)
    return ["", *lines] if lines else []


def read_report(file: str) -> dict[str, Any]:
    """A report that --json has written. Raises InputError."""
    try:
        path = Path(file)
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{file!r} is larger than any report")
        report = json.loads(path.read_text(encoding="utf-8"))
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the report {file!r}: {reason_of(error)}") from None
    if not _is_report(report):
        raise InputError(f"{file!r} is no report of kvanta bench serve --json")
    return dict(report)


def _is_report(report: Any) -> bool:
    """True if the report has every key that tables and plots use."""
    try:
        text_of([report])
        return all(
            isinstance(run[name], (int, float)) and run[name] >= 0
            for run in report["runs"]
            for name in ("request_throughput", "output_throughput", "peak_concurrency")
        ) and bool(report["runs"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return False
