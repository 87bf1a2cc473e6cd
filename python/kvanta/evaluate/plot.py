"""The picture of an evaluation: accuracy over bits per element, and over the memory of a full context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvanta.errors import InputError
from kvanta.evaluate.label_layout import place_labels
from kvanta.terminal.pictures import check_picture, new_figure, save_figure

_DOT, _FRONT = "#7a8794", "#0b6e99"
_CROWDED = 16  # formats; the labels of more need a higher picture


def check_plot(file: str, tasks: Sequence[str]) -> None:
    """Raises InputError, before the long work, if the picture could not be drawn."""
    check_picture(file)
    if "kl" not in tasks:
        raise InputError(f"--plot draws the figures of the task kl; the tasks are {', '.join(tasks)}")


def pareto_front(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names, smallest first, of the formats than which none is both as small and as accurate."""
    front: list[str] = []
    best = float("inf")
    for name in sorted(rows, key=lambda name: (rows[name]["bits_per_element"], rows[name]["kl_mean"])):
        if rows[name]["kl_mean"] < best:
            front.append(name)
            best = rows[name]["kl_mean"]
    return front


def write_plot(file: str, report: Mapping[str, Any]) -> None:
    """Draws the formats of an evaluation's report. Raises ResourceError if the file cannot be written."""
    rows = report["formats"]
    front = pareto_front(rows)
    figure = new_figure(13, 5.6 if len(rows) <= _CROWDED else 8.5)
    left, right = figure.subplots(1, 2)
    figure.suptitle(
        f"{report['model']}: cache formats against {report['reference']}, {report['tokens']:,} tokens of "
        f"{Path(report['text']).name} in windows of {report['context']:,}, second halves compared"
    )
    for color, label in ((_FRONT, "Pareto front: none is both smaller and of less divergence"), (_DOT, "others")):
        left.plot([], [], "o", color=color, label=label)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    _accuracy(left, rows, front)
    _memory(right, report, front)
    save_figure(figure, file)


def _draw(axes: Any, places: Mapping[str, tuple[float, float]], front: Sequence[str]) -> None:
    axes.plot(*zip(*(places[name] for name in front), strict=True), "-", color=_FRONT, alpha=0.4, zorder=1)
    for name, (x, y) in places.items():
        axes.plot([x], [y], "o", color=_FRONT if name in front else _DOT, zorder=4 if name in front else 3)
    axes.grid(True, which="both", alpha=0.25, linewidth=0.6)
    axes.margins(0.12)


def _accuracy(axes: Any, rows: Mapping[str, Mapping[str, Any]], front: Sequence[str]) -> None:
    least = 1e-7  # what a logarithmic axis can show; below it figures are rounding
    places = {name: (row["bits_per_element"], max(row["kl_mean"], least)) for name, row in rows.items()}
    axes.set_yscale("log")
    _draw(axes, places, front)
    for name, (bits, mean) in places.items():
        low, high = rows[name]["kl_mean_ci95"]
        ends = [[max(0.0, mean - max(low, least / 2))], [max(0.0, high - mean)]]
        color = _FRONT if name in front else _DOT
        axes.errorbar([bits], [mean], yerr=ends, fmt="none", color=color, capsize=3, linewidth=1, zorder=2)
    if len({mean for _, mean in places.values()}) == 1:  # a logarithmic axis without a range would be empty
        axes.set_ylim(min(mean / 2, max(low, least / 2)), max(mean * 2, high))
    axes.set_xlabel("bits per element of the cache, scales included")
    axes.set_ylabel("mean KL divergence (nats per token), bars: 95 %")
    axes.set_title("Accuracy over bits: down and left is better", fontsize=11)
    place_labels(axes, places, [places[name] for name in front])


def _memory(axes: Any, report: Mapping[str, Any], front: Sequence[str]) -> None:
    limit = report["model_limit"]
    unit, name_of_unit = (2**30, "GiB") if limit * _largest(report) >= 2**30 else (2**20, "MiB")
    rows = report["formats"]
    places = {name: (row["bytes_per_token"] * limit / unit, 100 * row["top1"]) for name, row in rows.items()}
    _draw(axes, places, front)
    axes.set_xlabel(f"{name_of_unit} of cache for a full context of {limit:,} tokens")
    axes.set_ylabel("same most likely token as the reference (%)")
    axes.set_title("Precision over memory: up and left is better", fontsize=11)
    above = axes.secondary_xaxis("top", functions=(lambda x: x * unit / limit, lambda x: x * limit / unit))
    above.set_xlabel("bytes per token", fontsize=9)
    place_labels(axes, places, [places[name] for name in front])


def _largest(report: Mapping[str, Any]) -> float:
    return max(float(row["bytes_per_token"]) for row in report["formats"].values())
