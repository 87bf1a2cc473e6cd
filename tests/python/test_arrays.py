"""kvanta.formats and kvanta.attention on arrays."""

from typing import Any

import numpy as np
import pytest
import tolerance
from numpy.typing import NDArray

from kvanta import InputError, attention, formats


def rows(tokens: int = 64, head_dim: int = 64, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((tokens, head_dim), dtype=np.float32)


def test_names() -> None:
    assert formats.names() == [row["name"] for row in formats.table()]
    assert {"bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"} <= set(formats.names())


def test_fp32_is_the_array_itself() -> None:
    x = rows()
    assert formats.encode("fp32", "k", x) == x.tobytes()
    np.testing.assert_array_equal(formats.decode("fp32", "v", x.tobytes(), x.shape), x)


def test_bf16_and_fp8_are_those_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = rows()
    assert formats.encode("bf16", "k", x) == x.astype(ml_dtypes.bfloat16).tobytes()
    assert formats.encode("fp16", "k", x) == x.astype(np.float16).tobytes()
    assert formats.encode("fp8", "v", x) == x.astype(ml_dtypes.float8_e4m3fn).tobytes()
    assert formats.encode("fp8", "v", x, static_scale=0.25) == (x / 0.25).astype(ml_dtypes.float8_e4m3fn).tobytes()


# Largest share of the squared signal that may be lost on normal values: int8 rounds to steps of amax / 127, whose
# squared error is step^2 / 12, at amax below 4.5 deviations; int4 to steps of amax / 8 within 32 channels, below 3.5.
@pytest.mark.parametrize(("name", "loss"), [("int8", (4.5 / 127) ** 2 / 12), ("int4", (3.5 / 8) ** 2 / 12)])
def test_integers_lose_little(name: str, loss: float) -> None:
    x = rows()
    data = formats.encode(name, "k", x)
    assert len(data) == int(64 * 64 * {"int8": 8 + 16 / 64, "int4": 4.5}[name] / 8)
    back = formats.decode(name, "k", data, x.shape)
    assert back.dtype == np.float32
    assert ((back - x) ** 2).sum() / (x**2).sum() < loss
    assert (back != x).any()


def test_a_mean_is_taken_off_and_put_back() -> None:
    mean = np.full(64, 50.0, dtype=np.float32)
    x = rows() + mean
    plain = formats.decode("int4", "k", formats.encode("int4", "k", x), x.shape)
    data = formats.encode("k=int4+mean,v=int4", "k", x, mean=mean)
    better = formats.decode("k=int4+mean,v=int4", "k", data, x.shape, mean=mean)
    assert ((better - x) ** 2).sum() < 0.1 * ((plain - x) ** 2).sum()


@pytest.mark.parametrize(
    ("scheme", "side", "x", "reason"),
    [
        ("int9", "k", rows(), "int9"),
        ("int8", "q", rows(), "q"),
        ("int4", "k", rows(head_dim=12), "head_dim 12: must be a multiple of 8"),
        ("int8", "k", np.zeros(5), r"x has shape \[5\]; expected \[tokens, head_dim\]"),
        ("int8", "k", "text", "numbers"),
        ("int8", "k", [[10**400] * 8], "x is not an array of numbers"),
        ("int8", "k", np.ones((2, 8), complex), "x is not an array of numbers: it has complex"),
        (5, "k", rows(), "scheme must .* got 5"),
        ("int8", None, rows(), "side must .* got None"),
    ],
)
def test_bad_arguments_of_encode(scheme: Any, side: Any, x: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        formats.encode(scheme, side, x)


def test_bad_arguments_of_decode() -> None:
    with pytest.raises(InputError):
        formats.decode("int8", "k", b"short", (64, 64))
    shapes: list[Any] = [(64,), (64, 64, 1), 64, (0, 64), (64, 2**40), ("a", "b"), (2**31 - 1, 2**31 - 1)]
    for shape in shapes:
        with pytest.raises(InputError):
            formats.decode("int8", "k", bytes(64), shape)
    numbers: list[Any] = [2**40, None, [1]]
    for data in numbers:
        with pytest.raises(InputError, match="must be bytes"):
            formats.decode("int8", "k", data, (64, 64))


@pytest.mark.parametrize(
    "options",
    [
        {"static_scale": "x"},
        {"static_scale": 1e300},
        {"through_exact_page": "no"},
        {"outliers": 5},
        {"outliers": None},
        {"outliers": "12"},
        {"mean": np.zeros(63)},
        {"mean": 1.0},
        {"query": np.eye(63)},
        {"query": np.eye(64)[None]},
        {"eigen": np.eye(64)},
    ],
    ids=repr,
)
def test_bad_options_of_encode(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        formats.encode("fp8", "k", rows(), **options)


def cubes(query_tokens: int = 3, tokens: int = 150, heads: int = 4, kv_heads: int = 2) -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(1)
    shapes = [(query_tokens, heads, 64), (tokens, kv_heads, 64), (tokens, kv_heads, 64)]
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def plain_attention(q: NDArray[np.float32], k: NDArray[np.float32], v: NDArray[np.float32]) -> NDArray[np.float64]:
    out = np.empty(q.shape)
    group = q.shape[1] // k.shape[1]
    for row in range(len(q)):
        seen = len(k) - len(q) + row + 1
        for head in range(q.shape[1]):
            keys = k[:seen, head // group].astype(np.float64)
            logits = keys @ q[row, head] / np.sqrt(q.shape[2])
            weights = np.exp(logits - logits.max())
            out[row, head] = weights @ v[:seen, head // group] / weights.sum()
    return out


def test_the_reference_is_attention() -> None:
    q, k, v = cubes()
    # The cache holds float32, the output is float32: only its rounding is left.
    np.testing.assert_allclose(
        attention.reference(q, k, v, scheme="fp32"), plain_attention(q, k, v), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("scheme", ["fp32", "bf16", "fp8", "int8", "int4", "k=int8,v=int4"])
def test_every_backend_equals_the_reference(scheme: str) -> None:
    q, k, v = cubes()
    expected = attention.reference(q, k, v, scheme=scheme)
    assert {"cpu-portable", "reference"} < set(attention.backends())
    for backend in attention.backends():
        found = attention.run(q, k, v, scheme=scheme, backend=backend)
        share = tolerance.NARROW_ATTENTION if "int4" in scheme else tolerance.ATTENTION
        if scheme in tolerance.NARROW_OPERANDS.get(backend, ()):
            share = tolerance.BF16_OPERANDS_ATTENTION
        assert np.abs(found - expected).max() < share * np.abs(expected).max(), backend


def test_a_query_sees_no_later_key() -> None:
    q, k, v = cubes(query_tokens=8)
    before = attention.run(q, k, v, scheme="int8")
    k[-3:] += 100
    after = attention.run(q, k, v, scheme="int8")
    np.testing.assert_array_equal(before[:5], after[:5])
    assert (before[5:] != after[5:]).any()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scheme": "int9"}, "int9"),
        ({"backend": "gpu"}, "gpu"),
        ({"scheme": 5}, "scheme must .* got 5"),
        ({"backend": "\udcff"}, "backend must be .*Unicode"),
        ({"page_size": 17}, "17"),
        ({"q": np.zeros((3, 5, 64))}, "5"),
        ({"q": np.zeros((3, 4, 32))}, "head_dim"),
        ({"q": np.zeros((200, 4, 64))}, "200|-50"),
        ({"v": np.zeros((10, 2, 64))}, "same shape"),
        ({"k": np.zeros((10, 64))}, r"k has shape \[10, 64\]; expected \[tokens, kv_heads, head_dim\]"),
        ({"q": np.zeros((3, 0, 64))}, "at least one"),
        ({"threads": "x"}, "threads must be a whole number in 1.* got 'x'"),
        ({"page_size": "x"}, "page_size must be a whole number in 1.* got 'x'"),
        ({"softmax_scale": "x"}, "softmax_scale must be a number .* got 'x'"),
        ({"softcap": -1.0}, "softcap must be a number .* got -1"),
        ({"sliding_window": -1}, "sliding_window must be a whole number in 0.* got -1"),
        ({"softmax_scale": 0.0}, r"softmax_scale must be a number in \(0, inf\), got 0"),
        ({"k_scale": 1.0}, r"k_scale has shape \[\]; expected \[2\]"),
        ({"k_scale": [[1.0], [2.0]]}, r"k_scale has shape \[2, 1\]; expected \[2\]"),
        ({"v_scale": ["x", 1]}, "v_scale is not an array of numbers"),
        ({"scheme": "int8", "k_scale": [2.0, 2.0]}, "scales of K are given, but int8 has no static scales; .*fp8_e4m3"),
        ({"scheme": "k=fp8,v=int4", "v_scale": [2.0, 2.0]}, "scales of V are given, but int4 has no static scales"),
        ({"k_mean": "x"}, "k_mean is not an array of numbers"),
        ({"scheme": "int4+mean", "k_mean": np.zeros((64, 2))}, r"k_mean has shape \[64, 2\]; expected \[2, 64\]"),
        ({"scheme": "int4+mean", "k_mean": np.full((2, 64), np.nan)}, "means for \\+mean are not all finite"),
        ({"k_mean": np.zeros((2, 64))}, "K has no \\+mean or \\+query"),
        ({"k_outliers": [[1, 2], [1, 2]]}, "K has no \\+outliers"),
        ({"k_outliers": [[1], [1, 2]]}, "k_outliers is not an array of numbers"),
        ({"scheme": "int4+outliers=2", "k_outliers": [1, 3, 2, 4]}, r"k_outliers has shape \[4\]; expected \[2, N\]"),
        ({"k_query": np.eye(64)}, r"k_query has shape \[64, 64\]; expected \[2, 64, 64\]"),
        ({"k_eigen": np.zeros((2, 64, 64))}, r"k_eigen has shape \[2, 64, 64\]; expected \[2, 65, 64\]"),
    ],
)
def test_bad_arguments(change: dict[str, Any], reason: str) -> None:
    q, k, v = cubes()
    with pytest.raises(InputError, match=reason):
        attention.run(**{"q": q, "k": k, "v": v, **change})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"threads": 3}, "threads must be a list of numbers of threads, got 3"),
        ({"threads": None}, "threads must be a list of numbers of threads, got None"),
        ({"threads": "2"}, "threads must be a list of numbers of threads, got '2'"),
        ({"threads": [1, "a"]}, "an entry of threads must be a whole number in 1.* got 'a'"),
        ({"threads": []}, "formats and threads must not be empty"),
        ({"formats": "int8"}, "formats must be a list of names of formats, got 'int8'"),
        ({"formats": None}, "formats must be a list of names of formats, got None"),
    ],
)
def test_bad_arguments_of_the_benchmark(change: dict[str, Any], reason: str) -> None:
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 64, "context": 64, "seconds": 0.0}
    with pytest.raises(InputError, match=reason):
        attention.bench(**{"formats": ["int8"], "threads": [1], **shape, **change})
