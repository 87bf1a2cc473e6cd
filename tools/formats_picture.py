#!/usr/bin/env python3
"""Draws README's picture: ten cache formats and llama.cpp's, from result files of the same text and tokens.

tools/formats_picture.py [PICTURE]        by default docs/results/formats.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvanta.evaluate.label_layout import place_labels
from kvanta.evaluate.plot import pareto_front
from kvanta.terminal.pictures import new_figure, save_figure

ROOT = Path(__file__).resolve().parents[1]
# Format -> the file of docs/results that has its figures.
FORMATS = {
    "int8": "eval",
    "fp8_e4m3": "eval",
    "int6_g32": "eval",
    "int4": "eval",
    "nvfp4": "eval",
    "k=int5_g32+query,v=int4": "query",
    "int4+query": "query",
    "k=t4+query,v=t4": "query",
    "k=t3+query,v=t3": "query",
    "k=klt3,v=t3": "query",
}
_FRONT, _OTHERS, _LLAMA_CPP = "#0b6e99", "#7a8794", "#b5482a"
_SAME = ("text_sha256", "tokens", "context")


def read_rows(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The formats' rows, llama.cpp's rows, and what the measurements have in common."""
    reports = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("eval", "query", "llama-cpp")}
    first = reports["eval"]
    for name, report in reports.items():
        if any(report[key] != first[key] for key in _SAME):
            raise SystemExit(f"error: {name}.json and eval.json differ in {' or '.join(_SAME)}")
    rows = {name: reports[file]["formats"][name] for name, file in FORMATS.items()}
    peers = {f"llama.cpp {row['format']}": row for row in reports["llama-cpp"]["rows"] if row["rotated"]}
    return rows, peers, first


def draw(rows: dict[str, Any], peers: dict[str, Any], about: dict[str, Any]) -> Any:
    """The figure: mean KL divergence over bits per element."""
    figure = new_figure(9, 5)
    axes = figure.subplots()
    axes.set_yscale("log")
    front = pareto_front(rows)
    places = {name: (row["bits_per_element"], row["kl_mean"]) for name, row in {**rows, **peers}.items()}
    axes.plot(*zip(*(places[name] for name in front), strict=True), "-", color=_FRONT, alpha=0.4, zorder=1)
    for name, place in places.items():
        color = _FRONT if name in front else _LLAMA_CPP if name in peers else _OTHERS
        axes.plot(*place, "X" if name in peers else "o", color=color, markersize=8 if name in peers else 7, zorder=3)
    axes.grid(True, which="major", alpha=0.25, linewidth=0.6)
    axes.margins(0.14)
    axes.set_xlabel("bits per element of the cache, scales included")
    axes.set_ylabel("mean KL divergence (nats per token)")
    text = f"{about['tokens']:,} tokens of WikiText-2 in windows of {about['context']:,}"
    axes.set_title(f"SmolLM2-135M-Instruct, {text}: down and left is better", fontsize=11)
    place_labels(axes, places, [places[name] for name in front])
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", nargs="?", default=str(ROOT / "docs/results/formats.png"))
    file = parser.parse_args().picture
    save_figure(draw(*read_rows(ROOT / "docs/results")), file)
    print(f"{file}: written")


if __name__ == "__main__":
    main()
