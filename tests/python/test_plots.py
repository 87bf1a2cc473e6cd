"""Pictures that commands draw: ticks and labels that can be read."""

from __future__ import annotations

import itertools

import pytest
from formats_picture import FORMATS, ROOT, draw, read_rows

from kvanta.evaluate.label_layout import place_labels
from kvanta.loadgen.plot import latency_scale, plain_number, spread_ticks
from kvanta.terminal.pictures import new_figure


def test_ticks_of_loads() -> None:
    assert spread_ticks([1, 2, 4, 8, 16]) == [1, 2, 4, 8, 16]
    assert spread_ticks([3]) == [3]
    many = spread_ticks(list(range(1, 101)))
    assert (many[0], many[-1]) == (1, 100)
    assert len(many) <= 21


def test_ticks_are_plain_numbers() -> None:
    assert [plain_number(value, 0) for value in (0.5, 7, 10, 20, 9000, 100000)] == ["0.5", "", "10", "20", "", "100000"]


@pytest.mark.parametrize(("values", "scale"), [((337, 374, 341), "linear"), ((20, 40, 900), "log"), ((), "linear")])
def test_latencies_have_labelled_ticks(values: tuple[float, ...], scale: str) -> None:
    figure = new_figure(4, 4)
    axes = figure.subplots()
    axes.plot(range(len(values)), values)
    latency_scale(axes)
    figure.draw_without_rendering()
    assert axes.get_yscale() == scale
    low, high = axes.get_ylim()
    ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    labels = [tick.label1.get_text() for tick in ticks if low <= tick.get_loc() <= high]
    assert len([label for label in labels if label]) >= 2


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


def test_the_picture_of_formats_names_every_format_once() -> None:
    figure = draw(*read_rows(ROOT / "docs/results"))
    (axes,) = figure.axes
    figure.draw_without_rendering()
    labels = {label.get_text(): label.get_window_extent() for label in axes.texts}
    assert labels.keys() == {*FORMATS, "llama.cpp q8_0", "llama.cpp q4_0"}
    assert not any(one.overlaps(other) for one, other in itertools.combinations(labels.values(), 2))
