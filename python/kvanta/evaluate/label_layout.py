"""Placement of labels next to the dots of a plot, without overlap."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

_FONT_SIZE = 9
_DOT_PIXELS = 7


def _offsets() -> list[tuple[float, float, str]]:
    """Places to try, in points from the dot, nearest first: x, y, and which side of the label is there."""
    places = []
    sides = (("left", 8), ("right", -8), ("center", 0))
    for distance, (side, x) in itertools.product((0, 8, 16, 26, 38, 52, 68), sides):
        for sign in (1, -1):
            rise = sign * (distance or (9 if side == "center" else 0))
            places.append((float(x), float(rise), side))
    return places


def place_labels(axes: Any, places: Mapping[str, tuple[float, float]]) -> None:
    """Writes each name next to its dot, in the axes' data coordinates; distant labels get a thin line to the dot."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    figure = axes.figure
    figure.draw_without_rendering()  # the layout decides where the dots are
    renderer = figure.canvas.get_renderer()
    frame = axes.get_window_extent()
    taken = []
    for place in places.values():
        x, y = axes.transData.transform(place)
        taken.append(Bbox.from_bounds(x - _DOT_PIXELS, y - _DOT_PIXELS, 2 * _DOT_PIXELS, 2 * _DOT_PIXELS))
    halo = [withStroke(linewidth=2.5, foreground="white")]
    for name, place in places.items():
        label = None
        for x, y, side in _offsets():
            if label is not None:
                label.remove()
            line = {"arrowstyle": "-", "color": "#9aa5b1", "linewidth": 0.6} if abs(y) > 12 else None
            label = axes.annotate(
                name,
                place,
                (x, y),
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=_FONT_SIZE,
                arrowprops=line,
                path_effects=halo,
                zorder=5,
            )
            box = label.get_window_extent(renderer) if line is None else _text_box(label, renderer)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)


def _text_box(label: Any, renderer: Any) -> Any:
    """Bounding box of the text alone, without the line to its dot."""
    from matplotlib.text import Text

    label.update_positions(renderer)
    return Text.get_window_extent(label, renderer)
