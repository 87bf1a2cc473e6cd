"""+query: the closed form, what a calibration keeps and refuses, and matrices that are made when a model is loaded."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import biased_twins
import numpy as np
import pytest
import safetensors.numpy
import tiny_checkpoints
from command_line import kvanta
from numpy.typing import NDArray

from kvanta import LLM, InputError, ResourceError, _core
from kvanta.calibration import Calibration, calibrate, save_checkpoint, write_scale_file
from kvanta.calibration.calibrate import calibrate_query
from kvanta.calibration.query_matrices import QueryMatrices, eigen_channels, query_matrix
from kvanta.calibration.statistics import collect_statistics
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.evaluate.divergence import kl_divergence
from kvanta.files.safetensors_writer import write_safetensors

RANDOM = np.random.default_rng(21)
TEXT = RANDOM.integers(3, 512, 8192)
TOKENS = RANDOM.integers(3, 512, 384)


def test_the_unit_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is part of those of the matrices' files."""
    monkeypatch.delenv("KVANTA_ISA", raising=False)
    best = _core.selected_isa("auto")
    for value, expected in (("auto", best), ("", best), ("portable", "portable")):
        monkeypatch.setenv("KVANTA_ISA", value)
        assert _core.selected_isa("auto") == expected
        assert quiet_llm(SHIPPED / "stories260k").stats()["isa"] == expected
    assert _core.selected_isa(best) == best, "an option overrides the environment"


def moments(size: int, rank: int, seed: int) -> NDArray[np.float64]:
    rows = np.random.default_rng(seed).normal(size=(rank, size)) * np.exp2(np.linspace(-3, 3, size))
    result: NDArray[np.float64] = rows.T @ rows / rank
    return result


def quiet_llm(folder: Path, **options: Any) -> LLM:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return LLM(folder, **{"max_model_len": 512, "kv_cache_memory_bytes": "8MiB", "threads": 1, **options})


@pytest.mark.parametrize("size", [8, 24, 64])
def test_keys_and_queries_get_the_same_moments(size: int) -> None:
    keys, queries = moments(size, 4 * size, 1), moments(size, 4 * size, 2)
    matrix = query_matrix(keys, queries).astype(np.float64)
    assert np.sum(matrix**2) == pytest.approx(size)
    inverse = np.linalg.inv(matrix)
    stored, read = matrix @ keys @ matrix.T, inverse.T @ queries @ inverse
    # But for the regularization, which adds a thousandth to each.
    assert (
        np.abs(stored / np.trace(stored) - read / np.trace(read)).max() < 0.01 * np.abs(stored / np.trace(stored)).max()
    )


@pytest.mark.parametrize("size", [8, 24, 64])
def test_eigen_channels_are_white_and_their_errors_those_of_logits(size: int) -> None:
    keys, queries = 100 * moments(size, 4 * size, 1), moments(size, 4 * size, 2)
    channels = eigen_channels(keys, queries).astype(np.float64)
    white, deviations = channels[:-1], channels[-1]
    # Regularization adds that part of the mean eigenvalue.
    regularized = [(keys, 1e-3), (queries, 0.3)]
    s, q = (moment + part * np.trace(moment) / size * np.eye(size) for moment, part in regularized)
    np.testing.assert_allclose(white @ s @ white.T, np.eye(size), atol=1e-3)
    logits = deviations[:, None] * white  # what an error of a key does to the logits of the queries
    metric = logits.T @ logits
    np.testing.assert_allclose(metric / np.trace(metric), q / np.trace(q), atol=1e-5)


def test_scales_of_the_moments_have_no_influence() -> None:
    keys, queries = moments(16, 64, 3), moments(16, 64, 4)
    np.testing.assert_allclose(query_matrix(keys, queries), query_matrix(1e6 * keys, 1e-6 * queries), rtol=1e-4)


@pytest.mark.parametrize(
    ("keys", "queries"),
    [
        (moments(64, 3, 5), moments(64, 256, 6)),
        (moments(64, 256, 5), moments(64, 1, 6)),
        (np.zeros((64, 64)), moments(64, 256, 6)),
        (moments(64, 256, 5) * (np.arange(64) != 7) * (np.arange(64) != 7)[:, None], moments(64, 256, 6)),
    ],
    ids=["rank 3", "rank 1", "dead head", "dead channel"],
)
def test_deficient_moments_give_a_matrix_that_the_engine_takes(
    keys: NDArray[np.float64], queries: NDArray[np.float64]
) -> None:
    channels = eigen_channels(keys, queries)
    assert (channels[-1] > 0).all()
    assert (np.diff(channels[-1]) <= 0).all()
    for matrix in (query_matrix(keys, queries).astype(np.float64), channels[:-1].astype(np.float64)):
        assert np.isfinite(matrix).all()
        assert np.linalg.norm(matrix) * np.linalg.norm(np.linalg.inv(matrix)) < 1e5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose keys have a bias that int4 does not bear."""
    work = tmp_path_factory.mktemp("query")
    base = biased_twins.still_pairs(tiny_checkpoints.write_checkpoint(work / "source"), work / "base", 3)
    return biased_twins.biased_keys(base, work / "biased", 3, 64.0)


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    reader = quiet_llm(folder, kv_cache_dtype="bf16")
    result = folder.parent / "query.safetensors"
    write_scale_file(result, calibrate(reader, TEXT, query=True), reader.model_info)
    return result


def test_scales_next_to_matrices_serve_keys_without_their_mean(tmp_path: Path) -> None:
    reader = quiet_llm(tiny_checkpoints.write_checkpoint(tmp_path), kv_cache_dtype="bf16")
    alone, both = (
        calibrate(reader, TEXT, query=True, key_mean=given, granularity="head", headroom=1) for given in (False, True)
    )
    centred = collect_statistics(reader, TEXT.tolist(), both.window, both.k_mean).amax[:, 0].max(axis=-1)
    assert (both.k_scale * 448 >= centred * (1 - 1e-6)).all()
    assert (alone.k_scale * 448 < centred).any()  # so that the assertion above says something


def test_two_processes_may_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As replicas do that are started together without a calibration."""
    means = np.zeros((1, 1, 8), np.float32)
    scales = np.ones((1, 1), np.float32)
    found = Calibration(
        layer_heads=[(1, 8)],
        granularity="head",
        method="amax",
        window=64,
        k_scale=scales,
        v_scale=scales,
        k_mean=means,
        k_outliers=None,
        tokens=64,
        statistics=None,
        query=QueryMatrices(means, np.eye(8, dtype=np.float32)[None, None], None),
    )
    info: Any = SimpleNamespace(architecture="x", layers=1, kv_heads=1, head_dim=8, hash="x")
    others = [tmp_path / "query.safetensors"]

    def write_and_be_overtaken(*arguments: Any) -> None:
        write_safetensors(*arguments)
        if others:
            write_scale_file(others.pop(), found, info)

    monkeypatch.setattr("kvanta.calibration.scale_file.write_safetensors", write_and_be_overtaken)
    write_scale_file(others[0], found, info)
    assert [file.name for file in tmp_path.iterdir()] == ["query.safetensors"]
    assert set(safetensors.numpy.load_file(tmp_path / "query.safetensors")) == {"layers.0.k_query"}
    for path in (tmp_path / "x\0.safetensors", tmp_path / "none" / "x.safetensors"):
        with pytest.raises(ResourceError, match="cannot write"):
            write_scale_file(path, found, info)


def divergence(folder: Path, file: Path | None, kv_cache_dtype: str, **options: Any) -> float:
    exact = quiet_llm(folder, kv_cache_dtype="fp32", dtype="float32").logits(TOKENS)
    path = "" if file is None else str(file)
    llm = quiet_llm(folder, kv_cache_dtype=kv_cache_dtype, dtype="float32", quantization_param_path=path, **options)
    return float(kl_divergence(exact, llm.logits(TOKENS))[192:].mean())


def test_biased_keys_are_mended(folder: Path, file: Path) -> None:
    assert divergence(folder, file, "int4+query") < 0.1 * divergence(folder, None, "int4")
    assert divergence(folder, file, "fp32+hadamard+query+exact=open") < 1e-4  # its exact pages are bf16


@pytest.mark.parametrize("scheme", ["klt3", "k=klt2,v=int8", "klt3_g64"])
def test_eigen_channels_carry_biased_keys(folder: Path, file: Path, scheme: str) -> None:
    found = divergence(folder, file, scheme)
    assert found < 0.25 * divergence(folder, None, scheme.replace("klt", "t").removesuffix("_g64")), "Hadamard alone"
    assert found > 0, "some pages are quantized"


def test_eigen_channels_need_a_calibration(folder: Path, file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no matrices for \+query"):
        quiet_llm(folder, kv_cache_dtype="klt3", auto_calibrate=False)
    with pytest.raises(InputError, match=r"klt3 is made of calibrated matrices"):
        quiet_llm(folder, kv_cache_dtype="klt3-query")
    tensors = safetensors.numpy.load_file(file)
    with safetensors.safe_open(file, "np") as opened:
        metadata = opened.metadata()
    older = tmp_path / "older.safetensors"
    safetensors.numpy.save_file({name: x for name, x in tensors.items() if "eigen" not in name}, older, metadata)
    assert quiet_llm(folder, kv_cache_dtype="int4+query", quantization_param_path=str(older))
    with pytest.raises(InputError, match=r"layer 0 has no k_eigen, which klt2 needs"):
        quiet_llm(folder, kv_cache_dtype="klt2", quantization_param_path=str(older))


def test_weighted_moments_count_queries_of_quantized_pages(folder: Path) -> None:
    llm = quiet_llm(folder, kv_cache_dtype="bf16")
    found = llm.query_moments(TOKENS)["weighted_query_moment"]
    assert (np.linalg.eigvalsh(found) > -1e-9 * np.trace(found, axis1=-2, axis2=-1)[..., None]).all()
    assert (np.trace(found, axis1=-2, axis2=-1) > 0).all()
    assert not llm.query_moments(TOKENS[:128])["weighted_query_moment"].any(), "no page to read quantized"


def test_moments_do_not_depend_on_threads_or_chunks(folder: Path) -> None:
    found = [
        quiet_llm(folder, kv_cache_dtype="bf16", threads=threads, max_num_batched_tokens=rows).query_moments(TOKENS)
        for threads, rows in ((1, 512), (2, 64))
    ]
    assert found[0]["tokens"] == len(TOKENS) - 64
    for key in ("amax", "key_sum", "key_moment", "query_moment", "weighted_query_moment"):
        np.testing.assert_array_equal(found[0][key], found[1][key], err_msg=key)
    np.testing.assert_array_equal(found[0]["key_moment"], found[0]["key_moment"].swapaxes(-1, -2))


def test_moments_are_those_of_the_keys(folder: Path) -> None:
    """Against the sums of squares that the statistics of scales have, of a text whose first page is left out."""
    llm = quiet_llm(folder, kv_cache_dtype="bf16")
    found, whole, first = llm.query_moments(TOKENS), llm.kv_statistics(TOKENS), llm.kv_statistics(TOKENS[:64])
    diagonal = np.einsum("lhii->lhi", found["key_moment"])
    np.testing.assert_allclose(diagonal, (whole["square_sum"] - first["square_sum"])[:, 0], rtol=1e-9)
    np.testing.assert_allclose(found["amax"], whole["amax"].max(axis=-1))


def test_a_copy_of_the_checkpoint_has_them(folder: Path, file: Path, tmp_path: Path) -> None:
    reader = quiet_llm(folder, kv_cache_dtype="bf16")
    copy = save_checkpoint(folder, tmp_path / "copy", calibrate(reader, TEXT, query=True))
    given = quiet_llm(folder, kv_cache_dtype="int4+query", quantization_param_path=str(file)).logits(TOKENS)
    own = quiet_llm(copy, kv_cache_dtype="int4+query", auto_calibrate=False).logits(TOKENS)
    np.testing.assert_array_equal(given, own)


def test_without_a_file_they_are_made_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path))
    with pytest.raises(InputError, match=r"no matrices for \+query.*--no-auto-calibrate"):
        quiet_llm(folder, kv_cache_dtype="int4+query", auto_calibrate=False)
    with caplog.at_level(logging.WARNING, "kvanta"):
        first = quiet_llm(folder, kv_cache_dtype="int4+query").logits(TOKENS)
    assert "calibrating +query on 8,192 tokens" in caplog.text
    (kept,) = (tmp_path / "query").iterdir()
    data = kept.read_bytes()
    caplog.clear()
    again = quiet_llm(folder, kv_cache_dtype="int4+query", auto_calibrate=False).logits(TOKENS)
    assert not caplog.text
    np.testing.assert_array_equal(first, again)
    load = ("--requests", "1", "--input-len", "8", "--output-len", "2", "--threads", "1")
    timed = kvanta("bench", "engine", str(folder), "--kv-cache-dtype", "int4+query", *load, KVANTA_HOME=str(tmp_path))
    assert timed.returncode == 0, timed.stderr
    kept.unlink()
    quiet_llm(folder, kv_cache_dtype="int4+query", threads=2)
    assert kept.read_bytes() == data, "the same bytes, whatever the number of threads"


def test_eigen_channels_are_measured_for_formats_that_need_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path))
    plain = quiet_llm(folder, kv_cache_dtype="int4+query").logits(TOKENS)
    (kept,) = (tmp_path / "query").iterdir()
    assert not any(name.endswith("k_eigen") for name in safetensors.numpy.load_file(kept))
    with caplog.at_level(logging.WARNING, "kvanta"):
        quiet_llm(folder, kv_cache_dtype="klt3")
    assert "calibrating" in caplog.text
    kept.unlink()
    (other,) = (tmp_path / "query").iterdir()
    assert any(name.endswith("k_eigen") for name in safetensors.numpy.load_file(other))
    same = quiet_llm(folder, kv_cache_dtype="int4+query", auto_calibrate=False).logits(TOKENS)
    np.testing.assert_array_equal(plain, same)


def test_kept_files_are_of_one_configuration(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    for model in (folder, changed):
        quiet_llm(model, kv_cache_dtype="int4+query")
    first, second = (file.read_bytes() for file in (tmp_path / "home" / "query").iterdir())
    assert first != second


@pytest.fixture(scope="module")
def turning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose keys have a bias that RoPE turns by 60 degrees within 256 tokens."""
    work = tmp_path_factory.mktemp("turning")
    base = tiny_checkpoints.write_checkpoint(work / "base", max_position_embeddings=2048, rope_theta=300.0)
    return biased_twins.biased_keys(base, work / "biased", 2, 32.0)


def test_moments_of_short_windows_are_those_of_a_long_context(turning: Path) -> None:
    llm = quiet_llm(turning, kv_cache_dtype="bf16", max_model_len=1024)

    def total(window: int, lengths: list[int]) -> dict[str, NDArray[np.float64]]:
        parts = [llm.query_moments(TEXT[i : i + window], False, lengths) for i in range(0, len(TEXT), window)]
        return {key: sum(part[key] for part in parts) / sum(part["tokens"] for part in parts) for key in parts[0]}

    long, own, turned = total(1024, []), total(256, []), total(256, [1024])
    for key in ("key_sum", "key_moment"):
        errors = [np.linalg.norm(found[key] - long[key]) for found in (own, turned)]
        assert errors[1] < 0.2 * errors[0], key


def test_matrices_hold_beyond_the_positions_of_their_text(turning: Path, tmp_path: Path) -> None:
    tokens = RANDOM.integers(3, 512, 2048)
    options = {"max_model_len": 2048, "dtype": "float32"}
    reader = quiet_llm(turning, kv_cache_dtype="bf16", **options)
    exact = quiet_llm(turning, kv_cache_dtype="fp32", **options).logits(tokens)

    def beyond(name: str, lengths: list[int] | None) -> float:
        file = tmp_path / f"{name}.safetensors"
        write_scale_file(file, calibrate_query(reader, TEXT, 256, lengths=lengths), reader.model_info)
        llm = quiet_llm(turning, kv_cache_dtype="int4+query", quantization_param_path=str(file), **options)
        return float(kl_divergence(exact, llm.logits(tokens))[1024:].mean())

    assert beyond("all", None) < 0.5 * beyond("text", [])


def test_refusals(folder: Path, file: Path, tmp_path: Path) -> None:
    reader = quiet_llm(folder, kv_cache_dtype="bf16")
    with pytest.raises(InputError, match=r"100 tokens: \+query needs at least 8,192"):
        calibrate(reader, TEXT[:100], query=True)
    with pytest.raises(InputError, match=r"a context of 0 tokens; this model takes 1 to"):
        reader.query_moments(TEXT[:100], True, [0])
    with pytest.raises(InputError, match=r"FILE.safetensors"):
        write_scale_file(tmp_path / "query.json", calibrate(reader, TEXT, query=True), reader.model_info)
    other = tiny_checkpoints.write_checkpoint(tmp_path / "other")
    with pytest.raises(InputError, match="the file belongs to another model"):
        quiet_llm(other, kv_cache_dtype="int4+query", quantization_param_path=str(file))
    tensors = safetensors.numpy.load_file(file)
    assert set(tensors) == {f"layers.{layer}.{name}" for layer in (0, 1) for name in ("k_query", "k_eigen")}
    stripped = tmp_path / "stripped.safetensors"
    safetensors.numpy.save_file(tensors, stripped)
    with pytest.raises(InputError, match="kvanta_kv_scales"):
        quiet_llm(folder, kv_cache_dtype="int4+query", quantization_param_path=str(stripped))
