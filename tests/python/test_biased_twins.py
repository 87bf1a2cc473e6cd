"""Keys that break a 4-bit cache, in models that are otherwise the same; and what holds them."""

from __future__ import annotations

import warnings
from pathlib import Path

import biased_twins
import numpy as np
import pytest
import tiny_checkpoints
from numpy.typing import NDArray

from kvanta import LLM, formats
from kvanta.calibration import calibrate, write_scale_file
from kvanta.calibration.statistics import KvStatistics
from kvanta.evaluate.divergence import kl_divergence

PAIRS = 3
BIAS = 64.0
TOKENS = np.random.default_rng(11).integers(3, 512, 384)  # six pages of 64
SCORED = slice(192, None)


def llm(folder: Path, kv_cache_dtype: str, scales: Path | None = None, dtype: str = "float32") -> LLM:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a scale file that a format does not need
        return LLM(
            folder,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            quantization_param_path="" if scales is None else str(scales),
            max_model_len=len(TOKENS),
            threads=1,
        )


def logits(folder: Path, kv_cache_dtype: str, scales: Path | None = None) -> NDArray[np.float32]:
    return llm(folder, kv_cache_dtype, scales).logits(TOKENS)


def mean_kl(reference: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(kl_divergence(reference[SCORED], other[SCORED]).mean())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twins")
    source = tiny_checkpoints.write_checkpoint(folder / "source")
    return biased_twins.still_pairs(source, folder / "base", PAIRS)


@pytest.fixture(scope="module")
def biased(base: Path) -> Path:
    return biased_twins.biased_keys(base, base.parent / "biased", PAIRS, BIAS)


@pytest.fixture(scope="module")
def means(biased: Path) -> Path:
    """Calibrated on other tokens than those that are scored."""
    reader = llm(biased, "fp32")
    text = np.random.default_rng(12).integers(3, 512, 768)
    file = biased.parent / "means.json"
    write_scale_file(file, calibrate(reader, text, key_mean=True), reader.model_info)
    return file


@pytest.fixture(scope="module")
def exact(base: Path) -> NDArray[np.float32]:
    return logits(base, "fp32")


def test_still_pairs_change_no_other_pair(base: Path) -> None:
    """The base is a model of its own, but at small distances the same as its source: only slow pairs were stopped."""
    source = llm(base.parent / "source", "fp32").logits(TOKENS[:4])
    found = llm(base, "fp32").logits(TOKENS[:4])
    assert not np.array_equal(source, found)
    assert np.abs(source - found).max() < 1e-2 * np.abs(source).max()


def test_biased_keys_leave_the_exact_logits(biased: Path, exact: NDArray[np.float32]) -> None:
    # q.b is up to 64 * sqrt(6) * |q| = 1e3, in f32 known to 1e-4: that is how far a logit of attention may move.
    assert mean_kl(exact, logits(biased, "fp32")) < 1e-6
    key_amax = llm(biased, "fp32").kv_statistics(TOKENS)["amax"][:, 0]
    assert (key_amax.max(axis=-1) > BIAS).all(), "the bias is in every head"
    statistics = KvStatistics(**llm(biased, "fp32").kv_statistics(TOKENS))
    assert (statistics.mean_shares()[:, 0] > 0.9).all()


def test_biased_keys_break_four_bits_and_means_mend_them(
    base: Path, biased: Path, means: Path, exact: NDArray[np.float32]
) -> None:
    plain = mean_kl(exact, logits(base, "int4-hadamard"))
    assert mean_kl(exact, logits(biased, "int4-hadamard")) > 20 * plain
    rotated = mean_kl(exact, logits(base, "int4"))
    assert mean_kl(exact, logits(biased, "int4")) > 4 * rotated, "a rotation alone spreads the bias"
    assert mean_kl(exact, logits(biased, "int4+mean", means)) < 2 * rotated
    if "kivi4" in formats.names():
        assert mean_kl(exact, logits(biased, "kivi4")) < 2 * mean_kl(exact, logits(base, "kivi4"))


def test_outlier_channels_leave_every_bit_and_break_four_bits(base: Path, exact: NDArray[np.float32]) -> None:
    twin = biased_twins.outlier_channels(base, base.parent / "outliers", pairs=2, factor=32.0)
    np.testing.assert_array_equal(logits(twin, "fp32"), exact)
    np.testing.assert_array_equal(logits(twin, "bf16"), logits(base, "bf16"))
    plain = mean_kl(exact, logits(base, "int4-hadamard"))
    assert mean_kl(exact, logits(twin, "int4-hadamard")) > 4 * plain
    reader = llm(twin, "fp32")
    file = twin.parent / "outliers.json"
    write_scale_file(file, calibrate(reader, TOKENS, outliers=4), reader.model_info)
    assert mean_kl(exact, logits(twin, "int4+outliers=4", file)) < 2 * plain
