"""The arithmetic of kvanta.evaluate against the plain one in double precision."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import numpy as np
import pytest

from kvanta.errors import InputError
from kvanta.evaluate.allocation import Choice, allocate, undominated
from kvanta.evaluate.divergence import kl_divergence, log_softmax
from kvanta.evaluate.generation_task import agreement
from kvanta.evaluate.held_out import against_uniform, line_of
from kvanta.evaluate.layer_divergence import layer_divergences
from kvanta.evaluate.packed_rows import pack, unpack
from kvanta.evaluate.passages import windows
from kvanta.evaluate.plot import pareto_front, write_plot
from kvanta.evaluate.recommend import parse_conditions, recommend
from kvanta.evaluate.row_metrics import RowMetrics, compare, pack_rows
from kvanta.evaluate.summary import (
    bootstrap_unit,
    bootstrap_units,
    confidence_interval,
    paired_difference,
    perplexity,
    summarize,
)


def peaked_logits(rows: int, vocab: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """As language models have them: a few likely tokens, a long tail."""
    rng = np.random.default_rng(seed)
    logits = 3 * rng.standard_normal((rows, vocab), dtype=np.float32)
    logits[:, :5] += 8 * rng.random((rows, 5), dtype=np.float32)
    return logits.astype(np.float32)


def test_packed_rows_are_finest_where_it_matters() -> None:
    logits = peaked_logits(50, 5000, 1)
    exact = log_softmax(logits)
    found = unpack(*pack(logits))
    error = np.abs(found - exact)
    step = 2 * np.sqrt(-exact * -exact.min(axis=1, keepdims=True)) / 65535
    assert (error <= 0.55 * step + 3e-6).all()  # half a step of the code, and float32's own rounding
    assert np.abs(np.exp(found.astype(np.float64)).sum(axis=1) - 1).max() < 1e-4


def test_packing_of_extreme_rows() -> None:
    rows = np.zeros((3, 4), dtype=np.float32)
    rows[1, 0] = 1e4  # certain
    rows[2] = [0, -1e30, -1e9, -1e30]
    codes, scales = pack(rows)
    exact = np.array([[0.25, 0.25, 0.25, 0.25], [1, 0, 0, 0], [1, 0, 0, 0]])
    np.testing.assert_allclose(np.exp(unpack(codes, scales)), exact, atol=1e-6)
    assert np.isfinite(scales).all()


def test_figures_against_double_precision() -> None:
    reference = peaked_logits(300, 3001, 2)
    noise = np.random.default_rng(3).standard_normal(reference.shape)
    targets = np.random.default_rng(4).integers(3001, size=300)
    packed = pack_rows(targets.tolist(), reference)
    for size in (0.0, 0.01, 0.3):
        other = (reference + size * noise).astype(np.float32)
        found = compare(packed, targets.tolist(), other)
        exact = kl_divergence(reference, other)
        np.testing.assert_allclose(found.kl, exact, rtol=2e-3, atol=1e-6)
        assert abs(found.kl.mean() - exact.mean()) < 1e-7 + 1e-5 * exact.mean()
        np.testing.assert_array_equal(found.same_top, reference.argmax(axis=1) == other.argmax(axis=1))
        np.testing.assert_allclose(found.target, log_softmax(other)[np.arange(300), targets], atol=1e-5)


def figures(*kl: float) -> RowMetrics:
    return RowMetrics(np.array(kl), np.array([True] * len(kl)), np.log(np.full(len(kl), 0.25)))


def test_summary() -> None:
    row = summarize([figures(0.0, 1.0), figures(2.0, 3.0), figures(4.0, 5.0), figures(6.0, 7.0)], 2.0)
    assert row["kl_mean"] == 3.5
    assert row["kl_median"] == 3.5
    assert row["kl_max"] == 7
    assert row["kl_p99"] == pytest.approx(6.93)
    assert (row["ppl"], row["ppl_ratio"]) == (pytest.approx(4), pytest.approx(2))
    low, high = row["kl_mean_ci95"]
    assert 0.5 <= low < 3.5 < high <= 6.5
    assert perplexity([-np.log(2.0)] * 7) == pytest.approx(2)


def test_the_interval_covers_the_true_mean() -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(100):
        low, high = confidence_interval([rng.exponential(size=50) for _ in range(30)])
        hits += low < 1 < high
    assert 85 <= hits <= 100
    assert confidence_interval([np.ones(3)] * 5) == [1.0, 1.0]


def test_what_the_bootstrap_draws() -> None:
    many = [figures(*[0.0] * 10)] * 4
    assert [len(unit) for unit in bootstrap_units(many)] == [10] * 4
    assert [len(unit) for unit in bootstrap_units([figures(*[0.0] * 300)])] == [150, 150]
    assert len(bootstrap_units([figures(0.0)])) == 1
    assert (bootstrap_unit(4), bootstrap_unit(3)) == ("windows", "blocks of 128 tokens")


def test_a_difference_on_the_same_texts() -> None:
    texts = np.random.default_rng(3).exponential(size=20)
    rows = {
        "a.json": {"kl_mean": 1.0, "kl_means": list(texts), "bits_per_element": 4.9},
        "near": {"kl_mean": 1.1, "kl_means": list(texts + 0.01), "bits_per_element": 5.0},
        "far": {"kl_mean": 1.2, "kl_means": list(texts + 0.1), "bits_per_element": 4.5},
        "large": {"kl_mean": 0.1, "kl_means": list(texts / 10), "bits_per_element": 5.5},
    }
    found = against_uniform(rows, "a.json", 5.0)
    assert found is not None
    assert found["uniform"] == "near"
    assert found["difference"] == pytest.approx(-0.01)
    assert found["difference_ci95"] == pytest.approx([-0.01, -0.01])
    assert line_of("a.json", 5.0, found).endswith("better")
    assert against_uniform(rows, "b.json", 5.0) is None
    assert against_uniform(rows, "a.json", 4.0) is None
    difference, (low, high) = paired_difference([1.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0])
    assert difference == 0
    assert low < 0 < high


def test_windows() -> None:
    tokens = list(range(100))
    first, second = windows(tokens, [], 40)
    assert (first.tokens, second.tokens) == (tuple(range(40)), tuple(range(40, 80)))
    assert (first.first, first.rows, first.targets) == (19, 20, tuple(range(20, 40)))
    (only,) = windows(tokens, [7], 200)
    assert only.tokens == (7, *tokens)
    assert [part.tokens[:2] for part in windows(tokens, [7], 51)] == [(7, 0), (7, 50)]
    with pytest.raises(InputError, match="3 tokens"):
        windows(tokens[:3], [], 40)


@pytest.mark.parametrize("seed", range(5))
def test_allocation_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits = [2.25, 4.5, 8.25, 16.0]
    items = [[Choice(str(b), b, float(h)) for b, h in zip(bits, rng.random(4), strict=True)] for _ in range(5)]
    for budget in (2.25, 4.0, 6.3, 16.0):
        fits = [each for each in itertools.product(*items) if sum(choice.bits for choice in each) <= 5 * budget]
        least = min(sum(choice.cost for choice in each) for each in fits)
        found = allocate(items, budget)
        assert sum(choice.bits for choice in found) <= 5 * budget
        assert sum(choice.cost for choice in found) == pytest.approx(least)
    with pytest.raises(InputError, match=r"the smallest has 2\.25"):
        allocate(items, 2.2)
    least = sum(min(choice.cost for choice in item) for item in items)
    assert sum(choice.cost for choice in allocate(items, float("inf"))) == pytest.approx(least)


def test_fronts() -> None:
    choices = [Choice("c", 8, 1.0), Choice("a", 4, 3.0), Choice("b", 6, 3.0), Choice("d", 8, 2.0)]
    assert [choice.name for choice in undominated(choices)] == ["a", "c"]
    rows = {choice.name: {"bits_per_element": choice.bits, "kl_mean": choice.cost} for choice in choices}
    assert pareto_front(rows) == ["a", "c"]


ROWS = {
    "int8": {"bytes_per_token": 8, "kl_mean": 0.001, "top1": 0.99},
    "mixed": {"bytes_per_token": 6, "kl_mean": 0.004, "top1": 0.97},
    "int4": {"bytes_per_token": 4, "kl_mean": 0.01, "top1": 0.95},
}


MEAN = 0.0014289995555090103  # the axis of some other means had a range by rounding


@pytest.mark.parametrize("interval", [(MEAN, MEAN), (1e-3, 9e-3)])
def test_the_picture_of_a_single_format(interval: tuple[float, float], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {
        "bits_per_element": 8.25,
        "bytes_per_token": 400,
        "kl_mean": MEAN,
        "kl_mean_ci95": interval,
        "top1": 0.97,
    }
    report = {"model": "m", "reference": "bf16", "tokens": 64, "text": "a.txt", "context": 64, "model_limit": 512}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as of axes without a range, which are not drawn
        write_plot(str(tmp_path / "one.png"), {**report, "formats": {"int8": row}})
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("conditions", "name"),
    [
        ("kl_mean<0.005", "mixed"),
        ("kl_mean <= 1e-3", "int8"),
        ("kl_mean<0.1", "int4"),
        ("kl_mean<0.1, top1>0.96", "mixed"),
        ("kl_mean<1e-9", None),
        ("needle>=0", None),  # was not measured
    ],
)
def test_recommend(conditions: str, name: str | None) -> None:
    assert recommend(ROWS, parse_conditions(conditions)) == name


@pytest.mark.parametrize("text", ["", "kl_mean", "kl_mean=3", "kl_mean<x", "speed>3", "kl_mean<1.2.3", "top1>0.9,"])
def test_conditions_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="recommend: "):
        parse_conditions(text)


def test_agreement() -> None:
    assert agreement([1, 2, 3], [1, 2, 3]) == 3
    assert agreement([1, 2, 3], [1, 5, 3]) == 1
    assert agreement([1, 2, 3], [1, 2]) == 2
    assert agreement([], [1]) == 0


def test_layers_harm_without_the_noise() -> None:
    noise = np.array([4.0, 3.0, 2.0])  # of the least change in a layer
    k = np.array(
        [noise + np.array([6.0, 0.0, 12.0]), noise + np.array([0.2, 0.0, 0.1])]
    )  # a coarse format and a fine one
    v = np.array([noise + np.array([0.0, 1.0, 0.0])])
    k_harms, v_harms = layer_divergences([k, v], [np.array([22.0, 4.9]), np.array([5.0])])
    np.testing.assert_allclose(
        k_harms, np.array([[6, 0, 12], [0.3, 0, 0.6]])
    )  # the fine one has the coarse one's shares
    np.testing.assert_allclose(v_harms, [[0, 1, 0]])
    nothing = np.zeros((0, 3))
    found = layer_divergences([nothing, np.array([noise])], [np.zeros(0), np.array([3.5])])
    np.testing.assert_array_equal(found[0], nothing)
    np.testing.assert_allclose(found[1], [[0, 0, 0]])
