"""Pictures that commands draw: ticks and labels that can be read."""

from __future__ import annotations

import itertools

from kvanta.evaluate.label_layout import place_labels
from kvanta.loadgen.plot import plain_number, spread_ticks
from kvanta.picture import new_figure


def test_ticks_of_loads() -> None:
    assert spread_ticks([1, 2, 4, 8, 16]) == [1, 2, 4, 8, 16]
    assert spread_ticks([3]) == [3]
    many = spread_ticks(list(range(1, 101)))
    assert (many[0], many[-1]) == (1, 100)
    assert len(many) <= 21


def test_ticks_are_plain_numbers() -> None:
    assert [plain_number(value, 0) for value in (0.5, 7, 10, 20, 9000, 100000)] == ["0.5", "", "10", "20", "", "100000"]


def test_labels_cover_neither_each_other_nor_lines() -> None:
    figure = new_figure(6, 5)
    axes = figure.subplots()
    places = {f"a_long_label_{index}": (4.5, float(index)) for index in range(6)}
    places |= {"left": (4.4, 2.5), "right": (9.0, 3.0), "top": (4.6, 9.0)}
    axes.plot(*zip(*places.values(), strict=True), "o")
    axes.margins(0.2)
    place_labels(axes, places, [places["left"], places["top"]])
    from matplotlib.text import Text

    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(label) for label in axes.texts]
    assert len(boxes) == len(places)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    lines = [label.arrow_patch for label in axes.texts if label.arrow_patch is not None]
    for line, (box, label) in itertools.product(lines, zip(boxes, axes.texts, strict=True)):
        path = line.get_transform().transform_path(line.get_path())
        assert label.arrow_patch is line or not path.intersects_bbox(box)
