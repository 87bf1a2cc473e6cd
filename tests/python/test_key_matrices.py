"""Matrices of +query, klt3 and klt2 as arguments of kvanta.formats and kvanta.attention."""

from __future__ import annotations

from typing import Any

import klt
import kv_encoders
import kv_formats
import numpy as np
import pytest
import tolerance
from kv_cells import BF16, F32

from kvanta import InputError, attention, formats

HEAD_DIM = 64
SHAPE = (40, HEAD_DIM)
UNEVEN = ["klt3", "klt2"]
GROUPED = ["klt3_g64", "klt2_g64"]


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def well_conditioned(seed: int) -> F32:
    matrix: F32 = normal(seed, HEAD_DIM, HEAD_DIM) * np.float32(0.03) + np.eye(HEAD_DIM, dtype=np.float32)
    return matrix


def eigen_of(seed: int, fall: float = 6.0) -> F32:
    deviations = np.exp2(-fall * np.arange(HEAD_DIM) / HEAD_DIM)
    return np.vstack([well_conditioned(seed), deviations]).astype(np.float32)


def product(matrix: F32, rows: F32) -> F32:
    """docs/formats.md, "The transform": sums over j, ascending, each product and sum rounded."""
    result = np.zeros_like(rows)
    for j in range(rows.shape[1]):
        result = result + rows[:, j, None] * matrix[:, j]
    return result


MEAN = normal(1, HEAD_DIM) * 20
KEYS = normal(2, *SHAPE) + MEAN


def test_query_matrices_take_the_place_of_the_rotation() -> None:
    matrix = well_conditioned(3)
    data = formats.encode("int4+query", "k", KEYS, mean=MEAN, query=matrix)
    assert data == kv_formats.encode("int4", product(matrix, KEYS - MEAN)).canonical()
    stored = kv_formats.decode("int4", data, SHAPE).astype(np.float64)
    expected = np.linalg.solve(matrix.astype(np.float64), stored.T).T + MEAN
    decoded = formats.decode("int4+query", "k", data, SHAPE, mean=MEAN, query=matrix)
    np.testing.assert_allclose(decoded, expected, rtol=1e-5, atol=1e-5)
    # V of the same scheme has no matrix.
    assert formats.encode("int4+query", "v", KEYS) == formats.encode("int4", "v", KEYS)


@pytest.mark.parametrize("fall", [0.0, 6.0, 40.0])
@pytest.mark.parametrize("name", UNEVEN)
def test_eigen_channels_get_their_bits(name: str, fall: float) -> None:
    eigen = eigen_of(4, fall)
    bits = kv_formats.on_side(name, "k").bits
    allocation = klt.allocate(eigen[-1], bits)
    rms = np.array(klt.RMS, np.float32)[allocation.bits]
    stored = product(eigen[:-1] * rms[:, None], KEYS - MEAN)
    packed, scales = klt.encode(stored, allocation)
    halves = scales.astype(np.float16)
    packed[halves == 0] = 0
    data = formats.encode(name, "k", KEYS, mean=MEAN, eigen=eigen)
    assert data == packed.tobytes() + (halves + np.float16(0)).tobytes()
    decoded = formats.decode(name, "k", data, SHAPE, mean=MEAN, eigen=eigen)
    levels = klt.levels_of(packed, allocation) * halves.astype(np.float64)[:, None]
    expected = np.linalg.solve(eigen[:-1].astype(np.float64), (levels / rms).T).T + MEAN
    np.testing.assert_allclose(decoded, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fall", [0.0, 6.0, 40.0])
@pytest.mark.parametrize("name", GROUPED)
def test_token_groups_have_their_own_bits(name: str, fall: float) -> None:
    eigen = eigen_of(4, fall)
    bits = kv_formats.on_side(name, "k").bits
    growth = np.exp2(np.arange(2 * klt.GROUP)[:, None] / 32 * np.linspace(-1, 1, HEAD_DIM))
    keys = (normal(7, 2 * klt.GROUP, HEAD_DIM) * growth).astype(np.float32) + MEAN
    stored = product(eigen[:-1], keys - MEAN)
    data = formats.encode(name, "k", keys, mean=MEAN, eigen=eigen)
    decoded = formats.decode(name, "k", data, keys.shape, mean=MEAN, eigen=eigen)
    codes, scales, sections, found, orders = [], [], [], [], []
    for first in range(0, len(keys), klt.GROUP):
        rows = stored[first : first + klt.GROUP]
        section, allocation, group = klt.group_of(rows, eigen[-1], bits)
        packed, unrounded = klt.encode(rows[:, group.channels] * (np.float32(1) / group.scales), allocation)
        halves = unrounded.astype(np.float16)
        codes.append(packed.tobytes())
        scales.append(halves.tobytes())
        sections.append(section.tobytes())
        found.append(klt.decode_group(packed, halves.astype(np.float32), section, HEAD_DIM, bits))
        orders.append(group.bits.tolist())
    assert data == b"".join(codes + scales + sections)
    assert fall == 40.0 or orders[0] != orders[1]
    expected = np.linalg.solve(eigen[:-1].astype(np.float64), np.concatenate(found).T.astype(np.float64)).T + MEAN
    np.testing.assert_allclose(decoded, expected, rtol=1e-5, atol=1e-5)


def test_through_an_exact_page_the_product_is_rounded() -> None:
    matrix = well_conditioned(5)
    rounded = kv_encoders.cast_saturating(product(matrix, KEYS - MEAN), BF16).astype(np.float32)
    data = formats.encode("int4+query", "k", KEYS, mean=MEAN, query=matrix, through_exact_page=True)
    assert data == kv_formats.encode("int4", rounded).canonical()


@pytest.mark.parametrize(
    ("scheme", "side", "options", "reason"),
    [
        ("int4+query", "k", {"mean": MEAN}, "K takes query and mean, and no eigen"),
        ("klt3", "k", {"mean": MEAN}, "K takes eigen and mean, and no query"),
        ("int4+query", "k", {"mean": MEAN, "eigen": eigen_of(1)}, "K takes query"),
        ("klt2", "k", {"mean": MEAN, "query": np.eye(64)}, "K takes eigen"),
        ("klt2", "k", {"mean": MEAN, "query": np.eye(64), "eigen": eigen_of(1)}, "K takes eigen"),
        ("int4+query", "k", {"query": np.eye(64)}, "give its matrix and the mean"),
        ("klt3", "v", {"eigen": eigen_of(1)}, "eigen is given, but V has no"),
        ("int4", "k", {"query": np.eye(64)}, "query is given, but K has no"),
        ("int4+mean", "k", {}, "give the mean"),
        ("int4+mean", "k", {"mean": np.full(64, np.inf)}, "not finite"),
        ("int4+query", "k", {"mean": MEAN, "query": np.zeros((64, 64))}, "singular"),
        ("int4+query", "k", {"mean": MEAN, "query": np.full((64, 64), np.nan)}, "not finite"),
        ("int4+query", "k", {"mean": MEAN, "query": np.eye(64) * 1e-39}, "does not fit float32"),
        ("klt3", "k", {"mean": MEAN, "eigen": eigen_of(1)[::-1]}, "deviation"),
        ("klt3", "k", {"mean": MEAN, "eigen": np.eye(65, 64)}, "deviation 0 of channel 0"),
    ],
)
def test_wrong_matrices_are_refused(scheme: str, side: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        formats.encode(scheme, side, KEYS, **options)
    with pytest.raises(InputError, match=reason):
        formats.decode(scheme, side, b"", SHAPE, **options)


def cubes() -> tuple[F32, F32, F32, F32]:
    """q, k, v and k_mean of two KV heads: 3 queries, 150 keys, which are far from 0."""
    means = normal(6, 2, HEAD_DIM) * 20
    return (
        normal(7, 3, 4, HEAD_DIM) * np.float32(0.25),
        normal(8, 150, 2, HEAD_DIM) + means,
        normal(9, 150, 2, HEAD_DIM),
        means,
    )


CALIBRATED: dict[str, dict[str, Any]] = {
    "int4+query": {"k_query": np.stack([well_conditioned(10), well_conditioned(11)])},
    "klt3": {"k_eigen": np.stack([eigen_of(10), eigen_of(11)])},
}


@pytest.mark.parametrize("scheme", CALIBRATED)
def test_attention_reads_keys_through_the_matrices(scheme: str) -> None:
    q, k, v, means = cubes()
    exact = attention.reference(q, k, v, scheme="fp32")
    options = {"scheme": scheme, "k_mean": means, **CALIBRATED[scheme]}
    expected = attention.reference(q, k, v, **options)
    scale = np.abs(exact).max()
    assert np.abs(expected - exact).max() < 0.2 * scale
    assert np.abs(attention.reference(q, k, v, scheme=scheme[:4].replace("klt3", "t3")) - exact).max() > 0.4 * scale
    for backend in attention.backends():
        found = attention.run(q, k, v, backend=backend, **options)
        assert np.abs(found - expected).max() < tolerance.NARROW_ATTENTION * np.abs(expected).max(), backend
    with pytest.raises(InputError, match=f"K takes {next(iter(CALIBRATED[scheme]))} and k_mean"):
        attention.run(q, k, v, scheme=scheme, k_mean=means)
    with pytest.raises(InputError, match=r"but there are 0 mean values"):
        attention.run(q, k, v, scheme=scheme, **CALIBRATED[scheme])
