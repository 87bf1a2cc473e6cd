"""Placement of labels next to the dots of a plot, without overlap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

_FONT_SIZE = 9
_DOT_PIXELS = 7


def _offsets() -> list[tuple[float, float, str]]:
    """Places to try, in points from the dot, nearest first: x, y, and which side of the label is there."""
    places = []
    sides = [("left", 8), ("right", -8), ("center", 0), ("left", 30), ("right", -30), ("left", 60), ("right", -60)]
    sides += [("left", 100), ("left", 150), ("left", 200)]
    for distance, (side, x) in itertools.product((0, 8, 16, 26, 38, 52, 68, 84, 100), sides):
        for sign in (1, -1):
            rise = sign * (distance or (9 if side == "center" else 0))
            places.append((float(x), float(rise), side))
    return sorted(places, key=lambda place: math.hypot(place[0], 2 * place[1]))


def place_labels(
    axes: Any, places: Mapping[str, tuple[float, float]], line: Sequence[tuple[float, float]] = ()
) -> None:
    """Writes each name next to its dot, in the axes' data coordinates; distant labels get a thin line to the dot.

    No label covers another one, a dot, a label's line or `line`, as far as there is room.
    """
    from matplotlib.path import Path
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    figure = axes.figure
    figure.draw_without_rendering()  # the layout decides where the dots are
    renderer = figure.canvas.get_renderer()
    frame = axes.get_window_extent()
    taken: list[Any] = []
    labels: list[Any] = []
    for place in places.values():
        x, y = axes.transData.transform(place)
        taken.append(Bbox.from_bounds(x - _DOT_PIXELS, y - _DOT_PIXELS, 2 * _DOT_PIXELS, 2 * _DOT_PIXELS))
    drawn = [Path(axes.transData.transform([begin, end])) for begin, end in itertools.pairwise(line)]
    halo = [withStroke(linewidth=2.5, foreground="white")]
    for name, place in places.items():
        label = leader = None
        dot = axes.transData.transform(place)
        for x, y, side in _offsets():
            if label is not None:
                label.remove()
            distant = abs(y) > 12 or abs(x) > 12
            style = {"arrowstyle": "-", "color": "#9aa5b1", "linewidth": 0.6, "relpos": _end(x, y)} if distant else None
            label = axes.annotate(
                name,
                place,
                (x, y),
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=_FONT_SIZE,
                arrowprops=style,
                path_effects=halo,
                zorder=5,
            )
            box = _text_box(label, renderer)
            right, up = _end(x, y)
            leader = Path([dot, (box.x0 + right * box.width, box.y0 + up * box.height)]) if distant else None
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            crossed = any(path.intersects_bbox(box) for path in drawn) or (
                leader is not None and any(leader.intersects_bbox(other) for other in labels)
            )
            if inside and not crossed and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
        labels.append(box)
        drawn += [leader] if leader is not None else []


def _end(x: float, y: float) -> tuple[float, float]:
    """Point of a label, as shares of its width and height, where the line to its dot ends."""
    return 0.5 if x == 0 else float(x < 0), float(y < 0) if abs(y) > 12 else 0.5


def _text_box(label: Any, renderer: Any) -> Any:
    """Bounding box of the text alone, without the line to its dot."""
    from matplotlib.text import Text

    label.update_positions(renderer)
    return Text.get_window_extent(label, renderer)
