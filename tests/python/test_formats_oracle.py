"""kvanta.formats against numpy and ml_dtypes: exhaustive conversions, exact values, random cells, round trips."""

from __future__ import annotations

import kv_formats
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_formats import F32

import kvanta.formats
from kvanta.errors import InputError

DTYPES = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
EIGHT_BIT = ["fp8_e4m3", "fp8_e5m2"]


def plain(name: str) -> str:
    """The scheme text of that format without a transform."""
    return name + ("-hadamard" if name in kv_formats.DEFAULT_HADAMARD else "")


def all_values(dtype: np.dtype[np.generic]) -> F32:
    with np.errstate(invalid="ignore"):
        values: F32 = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
    return values.reshape(-1, 256)


def test_the_oracle_knows_every_format() -> None:
    assert kvanta.formats.names() == list(kv_formats.NAMES)


@pytest.mark.parametrize("source", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("name", ["bf16", "fp16", *EIGHT_BIT])
def test_every_16_bit_value_encodes_as_ml_dtypes(name: str, source: type) -> None:
    x = all_values(np.dtype(source))
    with np.errstate(invalid="ignore"):
        expected = kv_formats.cast_saturating(x, DTYPES[name])
    got = np.frombuffer(kvanta.formats.encode(name, "k", x), DTYPES[name]).reshape(x.shape)
    nan = np.isnan(x)
    bits = np.dtype(f"u{DTYPES[name].itemsize}")
    assert np.array_equal(got.view(bits)[~nan], expected.view(bits)[~nan])
    assert np.isnan(got.astype(np.float32)[nan]).all()


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_every_code_decodes_as_ml_dtypes(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    got = kvanta.formats.decode(name, "v", codes.tobytes(), (1, 256))[0]
    np.testing.assert_array_equal(got, codes.view(DTYPES[name]).astype(np.float32))


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("fp8_e4m3", 1.0625, 0x38),
        ("fp8_e4m3", 1.1875, 0x3A),
        ("fp8_e4m3", 464.0, 0x7E),
        ("fp8_e4m3", 2.0**-10, 0x00),
        ("fp8_e4m3", 7.5 * 2.0**-9, 0x08),
        ("fp8_e5m2", 1.125, 0x3C),
        ("fp8_e5m2", 61440.0, 0x7B),
        ("fp8_e5m2", 2.0**-17, 0x00),
    ],
)
def test_values_of_the_specification(name: str, value: float, code: int) -> None:
    assert kvanta.formats.encode(name, "k", np.full((1, 8), value, np.float32))[0] == code


@st.composite
def rows(draw: st.DrawFn) -> F32:
    tokens = draw(st.integers(1, 17))
    head_dim = draw(st.sampled_from([32, 64, 96, 160]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = random.standard_normal((tokens, head_dim)) * 10.0 ** draw(st.floats(-9, 9))
    if draw(st.booleans()):  # values on a coarse grid make ties
        step = np.abs(x).max() / draw(st.sampled_from([7, 8, 127, 254]))
        x = np.rint(x / step) * step
    if draw(st.booleans()):
        x[random.random(x.shape) < 0.1] = draw(st.sampled_from([0.0, np.inf, -np.inf, np.nan, 3e38]))
    with np.errstate(over="ignore"):
        narrowed: F32 = x.astype(np.float32)
    return narrowed


@settings(max_examples=300, deadline=None)
@given(rows(), st.sampled_from(kv_formats.NAMES), st.sampled_from([1.0, 0.25, 0.03, 57.0]))
def test_random_rows_encode_as_the_oracle(x: F32, name: str, static_scale: float) -> None:
    got = kvanta.formats.encode(plain(name), "v", x, static_scale=static_scale)
    assert got == kv_formats.encode(name, x, static_scale=static_scale).canonical()


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("name", kv_formats.NAMES)
def test_hadamard_is_applied_and_undone(name: str, head_dim: int) -> None:
    x = np.random.default_rng(4).standard_normal((16, head_dim), np.float32)
    if name == "int4" and head_dim % 32:
        with pytest.raises(InputError, match=r"32.*head_dim 80.*int8"):
            kvanta.formats.encode(name, "k", x)
        return
    scheme = name if name in kv_formats.DEFAULT_HADAMARD else f"{name}+hadamard"
    data = kvanta.formats.encode(scheme, "k", x)
    assert data == kv_formats.encode(name, kv_formats.hadamard(x)).canonical()
    decoded = kvanta.formats.decode(scheme, "k", data, x.shape)
    rotated = kvanta.formats.decode(plain(name), "k", data, x.shape)
    np.testing.assert_array_equal(decoded, kv_formats.hadamard(rotated))
    assert np.mean((decoded - x) ** 2) / np.mean(x**2) < 0.01


def test_encoding_through_an_exact_page_rounds_to_bf16() -> None:
    x = np.random.default_rng(5).standard_normal((16, 64), np.float32)
    rounded = kv_formats.hadamard(x).astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = kv_formats.encode("int4", rounded).canonical()
    assert kvanta.formats.encode("int4", "k", x, through_exact_page=True) == expected


def test_k_mean_is_subtracted_and_added() -> None:
    random = np.random.default_rng(6)
    mean = random.standard_normal(64).astype(np.float32) * 30
    x = random.standard_normal((16, 64), np.float32) + mean
    data = kvanta.formats.encode("int4+mean", "k", x, mean=mean)
    assert data == kv_formats.encode("int4", kv_formats.hadamard(x - mean)).canonical()
    error = kvanta.formats.decode("int4+mean", "k", data, (16, 64), mean=mean) - x
    assert np.mean(error**2) < 0.01


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kvanta.formats.encode("int9", "k", np.zeros((1, 32))), "did you mean 'int8'"),
        (lambda: kvanta.formats.encode("nvfp4", "k", np.zeros((1, 32))), "not available in this version"),
        (lambda: kvanta.formats.encode("int8", "q", np.zeros((1, 32))), "must be k or v"),
        (lambda: kvanta.formats.encode("int8", "k", np.zeros(32)), "axes"),
        (lambda: kvanta.formats.encode("int8", "k", np.zeros((0, 32))), "at least one"),
        (lambda: kvanta.formats.encode("int8", "k", np.zeros((1, 12))), "multiple of 8"),
        (lambda: kvanta.formats.encode("fp8", "k", np.zeros((1, 32)), static_scale=0.0), "above 0"),
        (lambda: kvanta.formats.decode("int8", "k", b"", (1, 32)), "0 bytes"),
        (lambda: kvanta.formats.decode("int8", "k", b"", (-1, 32)), "at least one"),
    ],
)
def test_bad_input_is_refused_with_the_alternatives(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=message):
        call()
