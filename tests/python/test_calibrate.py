"""kvanta calibrate: scales, key means and outlier channels, in files that this engine and others read."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.numpy
import tiny_checkpoints
import tiny_classes
import tiny_models
from scale_probe import probe_tokens

from kvanta import LLM, InputError, _core, formats
from kvanta.calibration import Calibration, calibrate, default_tokens, save_checkpoint, write_scale_file
from kvanta.calibration.checkpoint_copy import quantization_config
from kvanta.calibration.default_text import TEXT
from kvanta.calibration.default_text import TOKENS as TOKENS_OF_A_CALIBRATION
from kvanta.calibration.scale_methods import LARGEST, static_scale
from kvanta.cli import main
from kvanta.engine.cache_reader import CacheReader
from kvanta.engine.config import engine_config
from kvanta.options.scheme_file import join_layers, write_scheme_file
from kvanta.text.tokenizer import Tokenizer

TOKENS = np.random.default_rng(5).integers(3, 512, 200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write_checkpoint(tmp_path_factory.mktemp("calibrate") / "model")


@pytest.fixture(scope="module")
def reader(folder: Path) -> LLM:
    return LLM(folder, kv_cache_dtype="bf16", max_model_len=128, kv_cache_memory_bytes="8MiB", threads=2)


def quiet_llm(folder: Path, **options: Any) -> LLM:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return LLM(folder, **{"max_model_len": 256, "kv_cache_memory_bytes": "8MiB", "threads": 1, **options})


def test_amax_is_the_engines_own_largest(folder: Path, reader: LLM) -> None:
    """Against scales that the engine measures by itself: another path to the same keys."""
    tokens = probe_tokens(folder, reader.model_info, 128)
    found = calibrate(reader, tokens, granularity="head")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = LLM(folder, kv_cache_dtype="fp8", calculate_kv_scales=True, max_model_len=128, threads=1)
    for layer, stats in enumerate(measured.stats()["layers"]):
        np.testing.assert_allclose(found.k_scale[layer], stats["k_scale"], rtol=1e-6)
        np.testing.assert_allclose(found.v_scale[layer], stats["v_scale"], rtol=1e-6)
    whole = calibrate(reader, tokens)
    np.testing.assert_array_equal(whole.k_scale[:, 0], found.k_scale.max(axis=1))
    tight = calibrate(reader, tokens, headroom=1)
    np.testing.assert_allclose(2 * tight.v_scale, whole.v_scale)
    for headroom in (0.5, float("nan"), 100):
        with pytest.raises(InputError, match="headroom"):
            calibrate(reader, tokens, headroom=headroom)


def test_default_tokens_have_those_of_the_chat_template() -> None:
    """Special tokens have the largest keys of many models."""
    written: list[tuple[list[str], bool]] = []

    class Words:
        """A tokenizer of words with a template of one special word for each message."""

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[str]:
            written.append((text.split(), add_special_tokens))
            return text.split()

        def apply_chat_template(self, messages: list[dict[str, str]], **options: object) -> str:
            assert options == {"add_generation_prompt": False}
            assert [message["role"] for message in messages[:2]] == ["user", "assistant"]
            return "".join(f"<|{message['role']}|> {message['content']}\n" for message in messages)

    words = cast("list[str]", default_tokens(cast("Tokenizer", Words())))
    text = TEXT.read_text(encoding="utf-8")
    assert words.count("<|user|>") >= text.count("\nUser: ") > 5
    assert "User:" not in words
    assert len(words) >= TOKENS_OF_A_CALIBRATION
    assert sum(len(part) for part, special in written if not special) > 400
    plain = text.replace("User: ", "<|user|> ").replace("Assistant: ", "<|assistant|> ").split()
    assert words[: len(plain)] == plain


def test_statistics_add_up(reader: LLM) -> None:
    found = reader.kv_statistics(TOKENS[:100])
    assert found["tokens"] == 100
    heads = found["histogram"].shape[:3]
    assert heads == (2, 2, 2)
    assert (found["histogram"].sum(axis=-1) == 100 * 64).all(), "every value in one bin"
    amax = found["amax"].max(axis=-1)
    for place in np.ndindex(*heads):
        last = np.flatnonzero(found["histogram"][place])[-1]
        assert found["edges"][last] <= amax[place] < found["edges"][last + 1]
        centres = (found["edges"][1:] + found["edges"][:-1]) / 2
        assert (found["histogram"][place] * centres**2).sum() == pytest.approx(
            found["square_sum"][place].sum(), rel=0.01
        )
    means = found["sum"][:, 0] / 100
    centred = reader.kv_statistics(TOKENS[:100], means)
    assert np.abs(centred["sum"][:, 0]).max() < 1e-3
    np.testing.assert_array_equal(centred["sum"][:, 1], found["sum"][:, 1])


def test_statistics_do_not_depend_on_threads_or_chunks(folder: Path, reader: LLM) -> None:
    other = LLM(folder, kv_cache_dtype="int8", max_model_len=128, max_num_batched_tokens=64, threads=1)
    expected = reader.kv_statistics(TOKENS[:120])
    found = other.kv_statistics(TOKENS[:120])
    for name in ("histogram", "amax", "sum", "square_sum"):
        np.testing.assert_array_equal(found[name], expected[name])


def squared_error(values: np.ndarray[Any, np.dtype[np.float32]], scale: float) -> float:
    data = formats.encode("fp8", "k", values, static_scale=scale)
    return float(((formats.decode("fp8", "k", data, values.shape, static_scale=scale) - values) ** 2).sum())


def histogram_of(values: np.ndarray[Any, np.dtype[np.float32]], edges: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
    return np.histogram(np.abs(values), edges)[0]


def test_methods() -> None:
    edges = np.exp2(np.arange(-1280, 641) / 64).astype(np.float32)
    values = np.random.default_rng(1).standard_normal((4096, 64)).astype(np.float32)
    values[0, 0] = 600.0  # one outlier of many
    histogram, amax = histogram_of(values, edges), 600.0
    assert static_scale("amax", edges, histogram, amax) == 2 * 600 / LARGEST
    assert static_scale("amax", edges, histogram, amax, headroom=1) == 600 / LARGEST
    share = static_scale("percentile", edges, histogram, amax, 99.9) * LARGEST
    assert np.mean(np.abs(values) <= share) >= 0.999
    assert share == pytest.approx(np.percentile(np.abs(values), 99.9), rel=0.02)
    assert static_scale("percentile", edges, histogram, amax, 100) == 600 / LARGEST

    best = static_scale("mse", edges, histogram, amax)
    candidates = 600 / LARGEST * np.exp2(-np.arange(-16, 65) / 16)
    errors = [squared_error(values, float(scale)) for scale in candidates]
    assert squared_error(values, best) <= 1.02 * min(errors)
    assert static_scale("mse", edges, np.zeros_like(histogram), 0.0) == 1.0


def test_the_file_reaches_the_live_cache(folder: Path, reader: LLM, tmp_path: Path) -> None:
    for granularity in ("tensor", "head"):
        found = calibrate(reader, TOKENS, granularity=granularity, method="mse", key_mean=True, outliers=4)
        file = tmp_path / f"{granularity}.json"
        write_scale_file(file, found, reader.model_info)
        text = json.loads(file.read_text())
        assert text["kvanta_kv_scales"] == 1
        assert text["model"]["hash"] == reader.model_info.hash
        assert np.shape(text["layers"]["1"]["k_outliers"]) == (2, 4)
        with pytest.raises(InputError, match=r"\+outliers=2, but there are 8 outlier channels for 2 KV heads"):
            quiet_llm(folder, kv_cache_dtype="int4+outliers=2", quantization_param_path=str(file))
        for name in ("fp8", "fp8+mean", "int4+mean"):
            llm = quiet_llm(folder, kv_cache_dtype=name, quantization_param_path=str(file))
            llm.logits(TOKENS)
            for layer, stats in enumerate(llm.stats()["layers"]):
                if name != "int4+mean":
                    np.testing.assert_array_equal(stats["k_scale"], np.broadcast_to(found.k_scale[layer], 2))
                    np.testing.assert_array_equal(stats["v_scale"], np.broadcast_to(found.v_scale[layer], 2))


def test_amax_saturates_nothing_that_was_seen(folder: Path, reader: LLM, tmp_path: Path) -> None:
    for name in ("fp8", "fp8+mean"):
        write_scale_file(tmp_path / "s.json", calibrate(reader, TOKENS[:128], key_mean=True), reader.model_info)
        llm = quiet_llm(folder, kv_cache_dtype=name, quantization_param_path=str(tmp_path / "s.json"))
        llm.logits(TOKENS[:128])
        # Layer 0 sees the very same values; the next ones differ by what fp8 did before them.
        assert llm.stats()["layers"][0]["k"]["saturated"] == 0


def test_outlier_channels() -> None:
    from kvanta.calibration.calibrate import _outlier_channels
    from kvanta.calibration.statistics import KvStatistics

    amax = np.ones((1, 2, 2, 8), dtype=np.float32)
    amax[0, 0, 0, [5, 2]] = 9, 7
    amax[0, 0, 1, [7, 1]] = 3, 4
    square_sum = np.ones((1, 2, 2, 8))
    square_sum[0, 0, :, 6] = 50
    edges, histogram = np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.int64)
    found = KvStatistics(1, edges, histogram, amax, np.zeros((1, 2, 2, 8)), square_sum)
    assert _outlier_channels(found, 2, "amax").tolist() == [[[2, 5], [1, 7]]]
    assert _outlier_channels(found, 1, "variance").tolist() == [[[6], [6]]]


@pytest.fixture(scope="module", params=["tensor", "head"])
def copy(request: pytest.FixtureRequest, folder: Path, reader: LLM) -> tuple[Path, Calibration]:
    found = calibrate(reader, TOKENS, granularity=request.param)
    return save_checkpoint(folder, folder.parent / f"copy-{request.param}", found), found


def test_a_copy_is_the_same_model_with_its_scales(folder: Path, reader: LLM, copy: tuple[Path, Calibration]) -> None:
    path, found = copy
    llm = quiet_llm(path)
    assert llm.config.kv_cache_dtype == "fp8_e4m3", "auto follows what config.json declares"
    assert llm.model_info.hash == reader.model_info.hash, "weights are the same"
    for layer, stats in enumerate(llm.stats()["layers"]):
        np.testing.assert_array_equal(stats["k_scale"], np.broadcast_to(found.k_scale[layer], 2))
        np.testing.assert_array_equal(stats["v_scale"], np.broadcast_to(found.v_scale[layer], 2))
    plain = quiet_llm(path, kv_cache_dtype="bf16").logits(TOKENS[:50])
    np.testing.assert_array_equal(plain, quiet_llm(folder, kv_cache_dtype="bf16").logits(TOKENS[:50]))
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in index.items():
        assert name in safetensors.numpy.load_file(path / file)
    shape = (2, 1, 1) if found.granularity == "head" else (1,)
    assert (
        safetensors.numpy.load_file(path / index["model.layers.1.self_attn.v_scale"])[
            "model.layers.1.self_attn.v_scale"
        ].shape
        == shape
    )
    with pytest.raises(InputError, match="is not an empty folder"):
        save_checkpoint(folder, path, found)
    with pytest.raises(InputError, match="has a quantization_config already"):
        save_checkpoint(path, path.parent / "twice", found)


def test_a_copy_of_shards(reader: LLM, copy: tuple[Path, Calibration], tmp_path: Path) -> None:
    path, found = copy
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    for file in path.iterdir():
        (sharded / file.name).write_bytes(file.read_bytes())
    config = json.loads((sharded / "config.json").read_text())
    del config["quantization_config"]
    (sharded / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"has KV scales already: tensor 'model\.layers\.0\.self_attn\.k_scale'"):
        save_checkpoint(sharded, tmp_path / "again", found)
    assert not (tmp_path / "again").exists()
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if "_scale" not in name}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    again = save_checkpoint(sharded, tmp_path / "again", found)
    assert quiet_llm(again).model_info.hash == reader.model_info.hash


def test_a_copy_with_a_scheme_for_each_layer(folder: Path, reader: LLM, tmp_path: Path) -> None:
    """Declared as ModelOpt does; `auto` gives the same bits as the schemes and scales given by hand."""
    found = calibrate(reader, TOKENS)
    schemes = ["fp8", "k=fp8,v=nvfp4"]
    path = save_checkpoint(folder, tmp_path / "copy", found, schemes)
    declared = json.loads((path / "hf_quant_config.json").read_text())["quantization"]
    assert declared["kv_cache_quant_algo"] == "MIXED_PRECISION"
    assert declared["kv_cache_quantized_layers"] == {
        "model.layers.0.self_attn": {"quant_algo": "FP8"},
        "model.layers.1.self_attn": {"quant_algo": "FP8_K_NVFP4_V"},
    }
    in_config = json.loads((path / "config.json").read_text())["quantization_config"]
    assert declared.items() <= in_config.items()
    assert in_config["quant_method"] == "modelopt"

    write_scale_file(tmp_path / "s.json", found, reader.model_info)
    scales = json.loads((tmp_path / "s.json").read_text())
    scales["layers"]["1"]["v_scale"] = 1.0  # NVFP4's blocks have scales of their own
    (tmp_path / "s.json").write_text(json.dumps(scales))
    by_hand = {"kv_cache_dtype_layers": join_layers(schemes), "quantization_param_path": str(tmp_path / "s.json")}
    expected = quiet_llm(folder, kv_cache_dtype="bf16", **by_hand)
    llm = quiet_llm(path)
    np.testing.assert_array_equal(llm.logits(TOKENS), expected.logits(TOKENS))
    assert llm.config.kv_cache_dtype_layers == join_layers([str(_core.KvScheme.parse(each)) for each in schemes])
    changed = quiet_llm(path, kv_cache_dtype_layers="0=bf16")
    assert changed.config.kv_cache_dtype_layers == "0=bf16;1=k=fp8_e4m3,v=nvfp4", "layers given by hand come first"
    with pytest.raises(InputError, match="layer 1 has no V scale"):
        quiet_llm(path, kv_cache_dtype="fp8")

    # Scales of NVFP4, which Kvanta does not use: the largest value of the tensor is the largest code and block scale.
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.1.self_attn.v_proj.v_scale"
    scale = safetensors.numpy.load_file(path / index[name])[name]
    assert found.statistics is not None
    assert scale == pytest.approx(found.statistics.amax[1, 1].max() / (6 * 448))


def test_schemes_that_modelopt_does_not_have(folder: Path, reader: LLM, tmp_path: Path) -> None:
    found = calibrate(reader, TOKENS[:64])
    layers = len(found.k_scale)
    with pytest.raises(
        InputError, match=r"layer 0: ModelOpt has no algorithm for the scheme 'int4'; there are: fp8_e4m3"
    ):
        save_checkpoint(folder, tmp_path / "copy", found, ["int4"] * layers)
    with pytest.raises(InputError, match="nothing to declare"):
        save_checkpoint(folder, tmp_path / "copy", found, ["bf16"] * layers)
    by_head = calibrate(reader, TOKENS[:64], granularity="head")
    with pytest.raises(InputError, match="one scale for a layer's K"):
        save_checkpoint(folder, tmp_path / "copy", by_head, ["fp8"] * layers)
    assert not (tmp_path / "copy").exists()


def test_compressed_tensors_reads_the_copy(copy: tuple[Path, Calibration]) -> None:
    """Their own reader of config.json; and loaded by it, the attention of every layer has our scales."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    path, found = copy
    declared = json.loads((path / "config.json").read_text())["quantization_config"]
    assert declared == quantization_config(found.strategy)
    config = quantization.QuantizationConfig.model_validate(declared)
    scheme = config.kv_cache_scheme
    assert scheme.num_bits == 8
    assert scheme.type == quantization.QuantizationType.FLOAT
    assert scheme.strategy == quantization.QuantizationStrategy(found.strategy)
    assert scheme.symmetric
    assert scheme.dynamic is False
    assert config.quantization_status == quantization.QuantizationStatus.FROZEN

    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    for layer, block in enumerate(model.model.layers):
        np.testing.assert_array_equal(block.self_attn.k_scale.detach().flatten(), found.k_scale[layer])
        np.testing.assert_array_equal(block.self_attn.v_scale.detach().flatten(), found.v_scale[layer])


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time there was a little girl named Lily. " * 20)
    words = ["calibrate", str(folder), "--text", str(tmp_path / "text.txt"), "--tokens", "150", "--threads", "1"]
    words += ["--context-length", "64", "--granularity", "head", "--method", "percentile", "--key-mean"]
    out, target = tmp_path / "scales.json", tmp_path / "copy"
    assert main([*words, "--out", str(out), "--save-checkpoint", str(target), "--json", str(tmp_path / "r.json")]) == 0
    assert "K constant" in capsys.readouterr().out
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["tokens"], report["window"], report["method"]) == (150, 64, "percentile 99.99")
    scales = json.loads(out.read_text())["layers"]["0"]["k_scale"]
    assert [min(scales), max(scales)] == pytest.approx(
        [report["layers"][0][f"k_scale_{end}"] for end in ("min", "max")]
    )
    with pytest.warns(UserWarning, match="the KV scales of layers 0-1 do not fit this model"):  # 99.99 % do
        llm = LLM(target, kv_cache_memory_bytes="8MiB", threads=1)
    assert llm.stats()["layers"][0]["k_scale"] == pytest.approx(scales)
    assert main([*words, "--out", str(tmp_path / "again.json")]) == 0
    assert (tmp_path / "again.json").read_bytes() == out.read_bytes()


def test_the_command_with_a_search_result(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    write_scheme_file(str(tmp_path / "found.json"), ["bf16"] + ["nvfp4"] * (layers - 1), {})
    words = ["calibrate", str(folder), "--tokens", "64", "--layer-schemes", str(tmp_path / "found.json")]
    assert main([*words, "--save-checkpoint", str(tmp_path / "copy")]) == 0
    with pytest.warns(UserWarning, match="layers 1 use 1.0"):  # as with every NVFP4 cache of a checkpoint
        llm = LLM(tmp_path / "copy", kv_cache_memory_bytes="8MiB", threads=1)
    assert llm.config.kv_cache_dtype_layers == "1=nvfp4"
    capsys.readouterr()
    assert main([*words, "--out", str(tmp_path / "s.json")]) == 2
    assert "--layer-schemes is declared in a copy" in capsys.readouterr().err


BAD: dict[str, tuple[list[str], str]] = {
    "nothing to write": ([], "nothing to write"),
    "a cache format": (["--out", "s.json", "--kv-cache-dtype", "int8"], "--kv-cache-dtype has no meaning here"),
    "too many tokens": (
        ["--out", "s.json", "--tokens", "100000000"],
        "--tokens must be in 1..25991, the length of the included texts, got 100000000",
    ),
    "no tokens": (
        ["--out", "s.json", "--tokens", "0"],
        "--tokens must be in 1..25991, the length of the included texts, got 0",
    ),
    "a percentile of nothing": (
        ["--out", "s.json", "--percentile", "0"],
        "percentile must be a number in (0, 100], got 0",
    ),
    "an odd number of outliers": (["--out", "s.json", "--outliers", "3"], "outliers must be even"),
    "an empty text": (["--out", "s.json", "--text", "/dev/null"], "'/dev/null' is empty"),
    "too many outliers": (["--out", "s.json", "--outliers", "65"], "outliers must be a whole number in 0..64, got 65"),
    "no such method": (["--out", "s.json", "--method", "best"], "best"),
    "no such text": (["--out", "s.json", "--text", "nowhere.txt"], "nowhere.txt"),
}


@pytest.mark.parametrize(("words", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert main(["calibrate", str(folder), "--threads", "1", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (folder.parent / "s.json").exists()


FAULTS: dict[str, tuple[list[str], Any, str]] = {
    "other model": (["model", "hash"], "fnv1a-0000000000000000", "the file belongs to another model"),
    "a layer missing": (["layers", "1"], ..., "all 2 layers must be there"),
    "infinite": (["layers", "0", "k_scale"], [1.0, float("inf")], "not valid JSON|number above 0"),
    "too large": (["layers", "0", "k_scale"], [1.0, 1e39], "number above 0"),
    "zero": (["layers", "0", "v_scale"], [0, 1.0], "number above 0"),
    "negative": (["layers", "1", "k_scale"], [1.0, -0.5], "number above 0"),
    "a head too many": (["layers", "1", "k_scale"], [1.0, 1.0, 1.0], "a list of 2 numbers"),
    "outliers out of range": (["layers", "0", "k_outliers"], [[0], [64]], "from 0 to 63"),
}


@pytest.mark.parametrize(("path", "value", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_wrong_files_are_refused(
    path: list[str], value: Any, message: str, folder: Path, reader: LLM, tmp_path: Path
) -> None:
    file = tmp_path / "s.json"
    write_scale_file(file, calibrate(reader, TOKENS[:64], granularity="head"), reader.model_info)
    content = json.loads(file.read_text())
    target = content
    for key in path[:-1]:
        target = target[key]
    if value is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        LLM(folder, kv_cache_dtype="fp8", quantization_param_path=str(file))


@pytest.mark.parametrize("name", ["Gemma3", "Mistral3", "Llama4", "Qwen3VL", "Qwen3_5"])
def test_a_multimodal_copy_names_scales_after_its_weights(name: str, tmp_path: Path) -> None:
    """... and layers without keys have none; towers have layers, too."""
    source = tmp_path / "model"
    model = tiny_classes.MULTIMODAL[name]()
    tiny_models.save(model, source)

    def engine(path: Path, kv_cache_dtype: str) -> _core.Engine:
        options = {"kv_cache_dtype": kv_cache_dtype, "max_model_len": 64, "threads": 1, "kv_cache_memory_bytes": 2**24}
        return _core.Engine(engine_config(str(path), options))

    reader = CacheReader(engine(source, "bf16"))
    copy = save_checkpoint(source, tmp_path / "copy", calibrate(reader, TOKENS[:100] % 64))
    names = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]
    scales = {key for key in names if key.endswith(("k_scale", "v_scale"))}
    attention = {key.removesuffix(".q_proj.weight") for key in names if key.endswith(".self_attn.q_proj.weight")}
    attention = {key for key in attention if "vision" not in key and "visual" not in key}
    assert scales == {f"{module}.{side}_scale" for module in attention for side in "kv"}
    found = engine(copy, "auto")
    assert found.config.kv_cache_dtype == "fp8_e4m3"
    assert any(layer["k_scale"][0] not in (0, 1) for layer in found.stats()["layers"] if layer["k_scale"])


def test_an_explicit_format_beats_an_unknown_declaration(folder: Path, tmp_path: Path) -> None:
    """... in commands that measure and plan, too."""
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "dynamic": True}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"kv_cache_scheme.dynamic' is true; .* choose another, as int8, fp8 or fp32"):
        LLM(model, kv_cache_memory_bytes="8MiB", threads=1)
    assert quiet_llm(model, kv_cache_dtype="int8").logits(TOKENS[:8]).shape[0] == 8
    out = tmp_path / "s.json"
    assert main(["calibrate", str(model), "--tokens", "64", "--threads", "1", "--out", str(out)]) == 0
    assert quiet_llm(model, kv_cache_dtype="fp8", quantization_param_path=str(out))
    assert main(["plan", str(model)]) == 0
    assert main(["eval", str(model), "--formats", "int8", "--tokens", "128", "--threads", "1"]) == 0
