"""The picture of `kvanta bench attention`: share of the machine's limit and speed against the own bf16 cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvanta.terminal.pictures import new_figure, save_figure

_THREADS = ("#0b6e99", "#e08a1e", "#5a9367", "#8a5a94")


def write_plot(file: str, report: Mapping[str, Any]) -> None:
    """Draws the rows of a report. Raises ResourceError if the file cannot be written."""
    rows: Sequence[Mapping[str, Any]] = report["rows"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    formats = list(dict.fromkeys(row["format"] for row in rows))
    threads = sorted({row["threads"] for row in rows})
    figure = new_figure(9.5, 1.2 + len(shapes) * (1.0 + 0.21 * len(formats) * (1 + len(threads)) / 2))
    panels = figure.subplots(len(shapes), 2, sharey=True, squeeze=False)
    figure.suptitle(f"Attention on {report['machine']['cpu']}, unit {', '.join(sorted({row['isa'] for row in rows}))}")
    for (left, right), shape in zip(panels, shapes, strict=True):
        left.set_title(report["shapes"][shape]["title"], fontsize=10, loc="left")
        left.set_xlabel("share of the machine's limit (%)", fontsize=9)
        right.set_xlabel("times as fast as the own bf16 cache", fontsize=9)
        for number, count in enumerate(threads):
            place = (number + 0.5) / len(threads) - 0.5
            found = {row["format"]: row for row in rows if row["shape"] == shape and row["threads"] == count}
            _bars(left, formats, found, place, 0.8 / len(threads), number, share=True)
            _bars(right, formats, found, place, 0.8 / len(threads), number, share=False)
        left.axvline(100, color="black", linewidth=0.8)
        right.axvline(1, color="black", linewidth=0.8)
        for axes in (left, right):
            axes.set_yticks(range(len(formats)), formats, fontsize=9)
            axes.tick_params(axis="x", labelsize=8)
            axes.grid(True, axis="x", alpha=0.25, linewidth=0.6)
            axes.margins(x=0.12)
            axes.set_xlim(left=0)
    panels[0][0].invert_yaxis()  # shared by all
    for number, count in enumerate(threads):
        color = _THREADS[number % len(_THREADS)]
        panels[0][0].bar([0], [0], color=color, label=f"{count} thread{'s' if count > 1 else ''}")
    panels[0][0].bar([0], [0], color="white", edgecolor="gray", hatch="////", label="the limit is the dot, else memory")
    figure.legend(loc="outside lower center", ncols=len(threads) + 1, fontsize=9, frameon=False)
    save_figure(figure, file)


def _bars(
    axes: Any,
    formats: Sequence[str],
    found: Mapping[str, Mapping[str, Any]],
    place: float,
    height: float,
    number: int,
    *,
    share: bool,
) -> None:
    names = [name for name in formats if name in found]
    values = [100 * found[name]["share_of_limit"] if share else found[name]["times_bf16"] for name in names]
    at = [formats.index(name) + place for name in names]
    bars = axes.barh(at, values, height=height, color=_THREADS[number % len(_THREADS)])
    for bar, name in zip(bars, names, strict=True):
        if share and found[name]["dot_ns"] > found[name]["memory_ns"]:
            bar.set_hatch("////")
            bar.set_edgecolor("white")
    axes.bar_label(bars, [f"{value:.0f}" if share else f"{value:.2f}" for value in values], padding=2, fontsize=7)
