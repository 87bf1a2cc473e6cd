"""`kvanta plan --fleet`: a trace over fleets of one model, by cache format and routing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvanta.errors import InputError
from kvanta.files.json_file import read_json_file
from kvanta.fleet.costs import ReplicaCosts, read_costs
from kvanta.fleet.simulate import ROUTINGS, Fleet, replicas_needed, simulate
from kvanta.loadgen.workload import Workload
from kvanta.terminal.pictures import new_figure, save_figure
from kvanta.terminal.tables import human_bytes, render_table

DEFAULT_FORMATS = ("bf16", "fp8", "int4")
_COLORS = {"round-robin": "#0b6e99", "prefix-aware": "#e08a1e", "shared-store": "#5a9367"}
_STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class FleetQuestion:
    """A question about fleets: their sizes, routings and target."""

    replicas: Sequence[int] = (1, 3, 10)
    routings: Sequence[str] = tuple(ROUTINGS)
    target_ttft_s: float | None = None
    """Target of the 99th percentile: the report then finds the fewest replicas that meet it."""
    store_bytes: float = math.inf
    cpus: float | None = None
    """CPUs that the replicas share; None: each has its own."""


def costs_by_format(file: str, formats: Sequence[str]) -> dict[str, ReplicaCosts]:
    """Reads benchmarks/fleet_costs.py's file, which has costs for all formats, or some for each. Raises InputError."""
    values = read_json_file(Path(file), dict)
    rows = values.get("formats")
    if rows is None:
        return dict.fromkeys(formats, read_costs(file))
    if not isinstance(rows, Mapping):
        raise InputError(f"{file}: formats must be an object")
    missing = [name for name in formats if name not in rows]
    if missing:
        raise InputError(f"{file}: no costs of format {missing[0]!r}; there are: {', '.join(map(str, rows))}")
    return {name: read_costs({"costs": rows[name]}) for name in formats}


def plan_fleet(
    plan: Mapping[str, Any], workload: Workload, costs: Mapping[str, ReplicaCosts], question: FleetQuestion
) -> dict[str, Any]:
    """The report. `plan`: kvanta.fleet.plan's for one replica's memory. Raises InputError."""
    longest = max(request.input_tokens + request.output_tokens for request in workload.requests)
    rows: list[dict[str, Any]] = []
    needed: list[dict[str, Any]] = []
    for layout in plan["formats"]:
        name = layout["name"]
        if longest > layout["tokens"]:
            raise InputError(
                f"the longest request has {longest:,} tokens, the cache of a replica in {name} {layout['tokens']:,}; "
                "give more --memory, or shorten requests by --max-input-len"
            )
        for routing in question.routings:
            fleet = Fleet(
                1,
                routing,
                layout["tokens"],
                layout["bytes_per_token"],
                costs[name],
                question.store_bytes,
                question.cpus,
            )
            rows += [
                {"format": name, **simulate(workload, Fleet(**{**vars(fleet), "replicas": count}))}
                for count in question.replicas
            ]
            if question.target_ttft_s is not None:
                count, _ = replicas_needed(workload, fleet, question.target_ttft_s)
                needed.append({"format": name, "routing": routing, "replicas": count})
    return {
        "model": plan["model"],
        "memory_bytes": plan["memory_bytes"],
        "trace": workload.source,
        "requests": len(workload.requests),
        "mean_rate": workload.mean_rate,
        "costs": {name: vars(each) for name, each in costs.items()},
        "target_ttft_s": question.target_ttft_s,
        "rows": rows,
        "needed": needed,
    }


def fleet_text(report: Mapping[str, Any]) -> str:
    """The tables for people."""
    header = ["format", "routing", "replicas", "hits", "first token p50", "p99", "tokens/s"]
    rows = [
        [
            row["format"],
            row["routing"],
            f"{row['replicas']:,}",
            f"{row['hit_rate']:.1%}",
            f"{row['ttft_p50_s']:.3f} s",
            f"{row['ttft_p99_s']:.3f} s",
            f"{row['output_tokens_per_s']:,.0f}",
        ]
        for row in report["rows"]
    ]
    title = (
        f"{report['model']}, {human_bytes(report['memory_bytes'])} a replica: {report['requests']:,} requests of "
        f"{report['trace']['file']}, {report['mean_rate']:.3g} a second"
    )
    text = f"{title}\n\n{render_table(header, rows, left=(0, 1))}"
    if not report["needed"]:
        return text
    needed = [
        [row["format"], row["routing"], "more than 1,000" if row["replicas"] is None else f"{row['replicas']:,}"]
        for row in report["needed"]
    ]
    target = f"first token within {report['target_ttft_s']:g} s in 99 % of the requests"
    return f"{text}\n\n{target}\n\n{render_table(['format', 'routing', 'replicas'], needed, left=(0, 1))}"


def draw_fleet(file: str, report: Mapping[str, Any]) -> None:
    """Hit rate and time to the first token over the number of replicas. Raises ResourceError."""
    rows: Sequence[Mapping[str, Any]] = report["rows"]
    formats = list(dict.fromkeys(row["format"] for row in rows))
    routings = list(dict.fromkeys(row["routing"] for row in rows))
    figure = new_figure(11, 4.2)
    panels = figure.subplots(1, 3)
    keys = (
        ("hit_rate", "prompt tokens found (%)"),
        ("ttft_p50_s", "first token, median (s)"),
        ("ttft_p99_s", "p99 (s)"),
    )
    for axes, (key, label) in zip(panels, keys, strict=True):
        for routing in routings:
            for style, name in zip(_STYLES * len(formats), formats, strict=False):
                line = sorted(
                    (row["replicas"], row[key] * (100 if key == "hit_rate" else 1))
                    for row in rows
                    if row["format"] == name and row["routing"] == routing
                )
                axes.plot(*zip(*line, strict=True), style, color=_COLORS.get(routing), marker="o", markersize=3)
        axes.set_xscale("log")
        if key != "hit_rate":
            axes.set_yscale("log")
        axes.set_xlabel("replicas")
        axes.set_ylabel(label)
        axes.grid(visible=True, alpha=0.25)
    for routing in routings:
        panels[0].plot([], [], "-", color=_COLORS.get(routing), label=routing)
    for style, name in zip(_STYLES * len(formats), formats, strict=False):
        panels[0].plot([], [], style, color="gray", label=name)
    figure.legend(loc="outside lower center", ncols=len(routings) + len(formats), fontsize=9, frameon=False)
    figure.suptitle(f"{report['model']}: {report['trace']['file']}, simulated", fontsize=11)
    save_figure(figure, file)
