"""The picture of one or several reports: throughput and latencies over the load, a line for each label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvanta.terminal.pictures import new_figure, save_figure

Report = Mapping[str, Any]


def load_axis(reports: Sequence[Report]) -> tuple[str, str]:
    """The variable of the runs, as title and key: the rate where one has any, else how many requests were under way."""
    if all(run["rate"] is not None for report in reports for run in report["runs"]):
        return "requests per second sent", "rate"
    return "most requests at one time", "peak_concurrency"


def plain_number(value: float, _: object) -> str:
    """A tick of a logarithmic axis: 20, 50 or 0.5, and none at digits between 1, 2 and 5 times a power of ten."""
    digits = f"{value:.0e}"
    return f"{value:g}" if digits[0] in "125" else ""


def latency_scale(axes: Any) -> None:
    """A logarithmic axis where the latencies span a factor of 5 or more, so that it has labels; else one from 0."""
    values = [value for line in axes.lines for value in line.get_ydata() if value > 0]
    if values and max(values) >= 5 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(plain_number)
        axes.yaxis.set_minor_formatter(plain_number)
    else:
        axes.set_ylim(bottom=0)


def spread_ticks(loads: Sequence[float]) -> list[float]:
    """Loads far enough apart for their labels, the first and the last among them."""
    gap = (loads[-1] - loads[0]) / 20
    shown = [loads[0]]
    for load in loads[1:]:
        if load - shown[-1] >= gap:
            shown.append(load)
    if shown[-1] != loads[-1]:
        shown[-1] = loads[-1]
    return shown


def write_plot(file: str, reports: Sequence[Report]) -> None:
    """Raises ResourceError if the file cannot be written."""
    figure = new_figure(14, 4.6)
    panels = figure.subplots(1, 3)
    title, key = load_axis(reports)
    figure.suptitle(f"{reports[0]['model']}: throughput and latency over load")
    throughput, first, others = panels
    for number, report in enumerate(reports):
        color = f"C{number % 10}"
        runs = sorted(report["runs"], key=lambda run: run[key])
        load = [run[key] for run in runs]
        throughput.plot(load, [run["output_throughput"] for run in runs], "o-", color=color, label=report["label"])
        for axes, name in ((first, "ttft_ms"), (others, "tpot_ms")):
            for point, line in (("p50", "o-"), ("p99", "^--")):
                shown = [(at, run[name][point]) for at, run in zip(load, runs, strict=True) if run[name]]
                if shown:
                    axes.plot(*zip(*shown, strict=True), line, color=color, linewidth=1.2, markersize=5)
    throughput.set_title("Output tokens per second", fontsize=11)
    throughput.set_ylim(bottom=0)
    first.set_title("Time to first token (ms)", fontsize=11)
    others.set_title("Time per output token after it (ms)", fontsize=11)
    for axes in (first, others):
        axes.plot([], [], "o-", color="gray", label="median")
        axes.plot([], [], "^--", color="gray", label="99 %")
        latency_scale(axes)
        axes.legend(fontsize=8, frameon=False)
    throughput.legend(fontsize=8, frameon=False)
    loads = sorted({run[key] for report in reports for run in report["runs"]})
    for axes in (first, others):
        axes.tick_params(which="both", labelsize=9)
    for axes in panels:
        axes.set_xticks(spread_ticks(loads), labels=[f"{load:g}" for load in spread_ticks(loads)])
        axes.set_xlabel(title)
        axes.grid(True, which="both", alpha=0.25, linewidth=0.6)
    save_figure(figure, file)
