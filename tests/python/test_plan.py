"""kvanta plan: bytes from a config alone, equal to what a running engine counts and allocates."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import sizing
import sparse_capacity
import tiny_checkpoints

from kvanta import LLM, InputError, ResourceError, SamplingParams, formats
from kvanta.checkpoint.resolve import example_configs, resolve_config
from kvanta.fleet.plan import plan

GIB = 2**30
# As published; Gemma 3 and Ministral 3 without their vision towers.
PARAMETERS = {
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3.2": 671_877_944_064,
    "deepseek-v4": 284_328_206_295,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-27b": 27_009_346_304,
    "glm-4-9b": 9_400_279_040,
    "glm-5": 743_911_218_432,
    "granite-3.3-8b": 8_170_864_640,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "llama-4-scout": 107_769_861_120,
    "mistral-7b": 7_248_023_552,
    "mistral-7b-v0.1": 7_241_732_096,
    "ministral-3-8b": 8_489_553_920,
    "ministral-8b": 8_019_808_256,
    "olmo-3-7b": 7_298_011_136,
    "phi-4": 14_659_507_200,
    "smollm3-3b": 3_075_098_624,
}
# Ratios of the field to bf16, by bits per element at a head size of 128.
RATIOS = {"fp8_e4m3": 2.0, "int4": 3.56, "nvfp4": 3.56, "int4_per_token_head": 3.76, "mxfp4": 3.76, "kivi2": 5.33}


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["formats"]}


def engine(folder: Path, name: str, **options: Any) -> LLM:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scales that were not given
        return LLM(folder, kv_cache_dtype=name, threads=1, **{"kv_cache_memory_bytes": "8MiB", **options})


def test_every_example_config_has_the_published_size() -> None:
    assert example_configs() == sorted(PARAMETERS)
    for name, parameters in PARAMETERS.items():
        report = plan(name, 2048 * GIB)
        assert report["parameters"] == parameters, name
        if name == "gpt-oss-20b":
            assert 13.7e9 < report["weight_bytes"] < 13.8e9, "experts in MXFP4"
            continue
        if name in {"deepseek-v3.2", "deepseek-v4"}:
            assert parameters < report["weight_bytes"] < 1.04 * parameters, "FP8 in blocks"
            continue
        assert 2 * parameters <= report["weight_bytes"] < 2.001 * parameters, "16 bits, norms and biases 32"


def test_latents_are_counted_once() -> None:
    found = rows(plan("deepseek-v2-lite", 64 * GIB))
    assert {name: row["bytes_per_token"] / 27 for name, row in found.items()} == {
        "fp32": 576 * 4,
        "bf16": 576 * 2,
        "fp16": 576 * 2,
        "mla_fp8": 656,
        "mla_fp8_e5m2": 656,
        "mla_int8": 512 + 32 + 128,
        "mla_int4": 256 + 32 + 128,
        "mla_nvfp4": 256 + 32 + 128,
    }
    assert found["mla_fp8"]["bits_per_element"] == 656 * 8 / 576
    short = rows(plan("deepseek-v2-lite", 64 * GIB, formats=["fp8", "int8", "int4"]))
    assert [row["bytes_per_token"] / 27 for row in short.values()] == [656, 672, 416]
    with pytest.raises(InputError, match=r"kivi4: this model's layers store K and V as one latent.*mla_fp8"):
        plan("deepseek-v2-lite", 64 * GIB, formats=["kivi4"])
    with pytest.raises(InputError, match=r"mla_fp8 stores the latents of MLA.*formats for them: fp32, bf16"):
        plan("llama-3.1-8b", 64 * GIB, formats=["mla_fp8"])


@pytest.mark.parametrize(("name", "layers"), [("deepseek-v3.2", 61), ("glm-5", 78)])
def test_keys_of_indexers_are_counted(name: str, layers: int) -> None:
    found = rows(plan(name, 2048 * GIB, formats=["bf16", "fp8", "int8", "int4", "nvfp4"]))
    keys = {"bf16": 256, "fp8": 132, "int8": 132, "int4": 132, "nvfp4": 132}
    latents = {"bf16": 1152, "fp8": 656, "int8": 672, "int4": 416, "nvfp4": 416}
    assert {row: found[row]["bytes_per_token"] / layers for row in found} == {
        row: latents[row] + keys[row] for row in latents
    }
    narrow = rows(plan(name, 2048 * GIB, formats=["int4"], options={"indexer_cache_dtype": "int4"}))
    assert narrow["int4"]["bytes_per_token"] / layers == 416 + 64 + 8


@pytest.mark.parametrize(
    "name",
    sorted(
        PARAMETERS.keys()
        - {"deepseek-v2-lite", "deepseek-v3.2", "deepseek-v4", "glm-5", "gemma-2-9b", "gemma-3-4b", "gpt-oss-20b"}
    ),
)
def test_known_ratios_to_bf16(name: str) -> None:
    # Only layers in this format count: some names keep the first and last in bf16.
    apart = [row for row in formats.table() if row["latents"] != "only"]
    bits = {row["name"] + "+edges=0" * (row["edge_layers"] > 0): row["bits_per_element"] for row in apart}
    found = rows(plan(name, formats=list(bits)))
    assert found.keys() >= bits.keys(), "heads of 128 take every format"
    for format_name, expected in bits.items():
        assert found[format_name]["bits_per_element"] == expected
        assert found[format_name]["ratio_to_bf16"] == pytest.approx(16 / expected)
    for format_name, ratio in RATIOS.items():
        if format_name in found:
            assert round(found[format_name]["ratio_to_bf16"], 2) == ratio


def test_bytes_per_token_of_a_known_model() -> None:
    bf16 = rows(plan("llama-3.1-8b", 24 * GIB, context=8192))["bf16"]
    assert bf16["bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert bf16["sequence_bytes"] == 8192 * bf16["bytes_per_token"] == GIB
    assert bf16["sequences"] == (24 * GIB - plan("llama-3.1-8b")["weight_bytes"]) // GIB == 9


def test_the_config_alone_says_what_the_folder_says(tmp_path: Path) -> None:
    folder = tiny_checkpoints.write_checkpoint(tmp_path / "model")
    (tmp_path / "alone").mkdir()
    shutil.copyfile(folder / "config.json", tmp_path / "alone" / "config.json")
    shutil.copyfile(folder / "config.json", tmp_path / "shape.json")
    expected = plan(str(folder), GIB)
    for model in (
        folder / "config.json",
        tmp_path / "alone",
        tmp_path / "alone" / "config.json",
        tmp_path / "shape.json",
    ):
        assert {**plan(str(model), GIB), "model": str(folder)} == expected, model


def test_a_config_that_does_not_say_its_dtype(tmp_path: Path) -> None:
    config = {name: value for name, value in tiny_checkpoints.CONFIG.items() if name != "torch_dtype"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="choose a dtype: bfloat16"):
        plan(str(tmp_path), GIB)
    assert plan(str(tmp_path), GIB, options={"dtype": "float16"})["dtype"] == "float16"


EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LOCAL_EXPERTS = {"num_local_experts": 16, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "truncate": False}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": EXPERTS,
    "Mixtral": LOCAL_EXPERTS,
    "GptOss": LOCAL_EXPERTS | {"sliding_window": 64, "rope_scaling": YARN},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_are_the_engines(tmp_path: Path, architecture: str, tied: bool) -> None:
    changes: dict[str, Any] = {"tie_word_embeddings": tied, "architectures": [f"{architecture}ForCausalLM"]}
    changes["model_type"] = "".join("_" * (c.isupper() and i > 0) + c.lower() for i, c in enumerate(architecture))
    changes |= ARCHITECTURES[architecture]
    folder = tiny_checkpoints.write_checkpoint(tmp_path / "model", **changes)
    shapes = tiny_checkpoints.shapes(tiny_checkpoints.CONFIG | changes)
    for dtype in ("float32", "bfloat16"):
        report = plan(str(folder), GIB, options={"dtype": dtype})
        llm = engine(folder, "bf16", dtype=dtype)
        assert report["weight_bytes"] == llm.stats()["weight_bytes"] == llm.model_info.weight_bytes
        assert report["parameters"] == sum(math.prod(shape) for shape in shapes.values())
    for weight_dtype in ("int8", "int4"):
        options = {"dtype": "bfloat16", "weight_dtype": weight_dtype}
        smaller = plan(str(folder), GIB, options=options)["weight_bytes"]
        assert smaller == engine(folder, "bf16", **options).stats()["weight_bytes"] < report["weight_bytes"]


LAYER_MAPS: dict[str, dict[str, Any]] = {
    "one format": {},
    "layers apart": {"kv_cache_dtype_layers": "0=int8"},
    "layers skipped": {"kv_cache_dtype_skip_layers": ["1"]},
}


@pytest.mark.rotation("options", 2, "window")
@pytest.mark.parametrize("options", LAYER_MAPS.values(), ids=LAYER_MAPS.keys())
@pytest.mark.parametrize("window", [0, 100])
def test_the_engine_holds_as_many_sequences_as_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, options: dict[str, Any]
) -> None:
    """The planned number of sequences runs concurrently without a preemption, in exactly the planned bytes."""
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))  # for the calibration of klt3 and klt2
    context, sequences = 300, 3
    changes: dict[str, Any] = {"num_hidden_layers": 2}
    if window:
        changes |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    folder = tiny_checkpoints.write_checkpoint(tmp_path / "model", **changes)
    options = {**options, "enable_prefix_caching": False}
    report = plan(str(folder), GIB, None, context, options)
    assert rows(report)
    for name, row in rows(report).items():
        memory = sequences * row["sequence_bytes"]
        (again,) = plan(str(folder), report["weight_bytes"] + memory, [name], context, options)["formats"]
        assert again["sequences"] == sequences
        pages = {"max_num_batched_tokens": 64, "block_size": 64}  # a page at a time, as sequence_bytes counts
        llm = engine(folder, name, kv_cache_memory_bytes=memory, max_model_len=context, **pages, **options)
        stats = llm.stats()
        assert row["bytes_per_token"] == stats["bytes_per_token"]
        assert row["page_bytes"] == stats["page_bytes"]
        assert stats["cache_budget_bytes"] == memory
        prompts = [{"prompt_token_ids": [3 + i] * (context - 40)} for i in range(sequences)]
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        outputs = llm.generate(prompts, params)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [40] * sequences
        assert llm.stats()["preemptions"] == 0, name


def test_a_sliding_window_frees_pages() -> None:
    windowed = rows(plan("mistral-7b-v0.1", 32 * GIB, context=32768))["bf16"]
    whole = rows(plan("mistral-7b", 32 * GIB, context=32768))["bf16"]
    assert windowed["bytes_per_token"] == whole["bytes_per_token"]
    assert windowed["sequence_bytes"] == (4095 // 64 + 3) * windowed["page_bytes"], "window, open page, page in step"
    assert windowed["sequences"] > 6 * whole["sequences"]
    assert windowed["tokens"] > 6 * whole["tokens"]


def test_groups_take_what_their_windows_need() -> None:
    """Gemma 3, five windows of 1,024 to one full layer: at 131,072 tokens the cache is that of the windows."""
    row = rows(plan("gemma-3-27b", 128 * GIB, context=131072))["bf16"]
    layer = row["page_bytes"] / 62 / 64  # bytes of a token
    need = layer * (10 * 131072 + 52 * 1024)
    assert need <= row["sequence_bytes"] <= 1.05 * need


def test_layer_maps_do_not_move_the_reference() -> None:
    mixed = rows(plan("llama-3.1-8b", options={"kv_cache_dtype_layers": "0-15=fp8"}))
    assert mixed["bf16"]["ratio_to_bf16"] == pytest.approx(4 / 3)
    assert mixed["fp8_e4m3"]["ratio_to_bf16"] == 2


def test_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean llama-"):
        plan("llama-9")
    with pytest.raises(InputError, match=r"llama-3\.1-8b, llama-4-scout"):
        plan("no-such-thing")
    with pytest.raises(ResourceError, match="no room for a cache"):
        plan("llama-3.1-70b", 8 * GIB)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="'architectures' is missing"):
        plan(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text(
        json.dumps(tiny_checkpoints.CONFIG | {"hidden_size": 2**24, "intermediate_size": 2**24})
    )
    with pytest.raises(InputError, match="more than any machine holds"):
        plan(str(tmp_path / "config.json"))
    with pytest.raises(InputError, match="int9"):
        plan("llama-3.1-8b", options={"kv_cache_dtype_layers": "0=int9"})
    for name in ("kv_cache_memory_bytes", "max_total_tokens", "num_gpu_blocks_override", "quantization_param_path"):
        with pytest.raises(InputError, match=f"{name} has no meaning here, got '1'"):
            plan("llama-3.1-8b", options={name: "1"})
    assert resolve_config("LLAMA-3.1-8B").path.name == "llama-3.1-8b.json"


@pytest.mark.parametrize(("name", "module"), [("sizing", sizing), ("sparse-capacity", sparse_capacity)])
def test_the_tables_of_sizes_are_what_plan_says(name: str, module: Any) -> None:
    file = Path(__file__).resolve().parents[2] / f"docs/results/{name}.json"
    report = json.loads(file.read_text())
    assert report == {"context": module.CONTEXT, "rows": module.rows()}
