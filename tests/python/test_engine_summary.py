"""The line about an engine in the server's log and repr(llm): figures of `kvanta plan`, which the scheduler obeys."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_classes
import tiny_models
from tiny_checkpoints import write_checkpoint

from kvanta import LLM, SamplingParams, _core
from kvanta.engine.config import engine_config
from kvanta.engine.summary import EngineSummary, summarize
from kvanta.fleet.plan import plan

LENGTH = 192  # three pages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads take the formats of 32 channels."""
    return write_checkpoint(tmp_path_factory.mktemp("summary") / "model")


def summary(folder: Path, sequences: float, **options: Any) -> EngineSummary:
    """The summary of an engine that has memory for so many sequences of LENGTH tokens."""
    options = {"max_model_len": LENGTH, "threads": 1, **options}
    layout = _core.plan_cache_bytes(engine_config(str(folder), options))
    llm = LLM(folder, kv_cache_memory_bytes=int(sequences * layout.sequence_bytes), **options)
    return llm._loaded.summary()


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "int8", "int4", "int4+exact=2"])
@pytest.mark.parametrize("sequences", [1, 2.99, 7])
def test_sequences_are_those_of_plan(folder: Path, kv_cache_dtype: str, sequences: float) -> None:
    found = summary(folder, sequences, kv_cache_dtype=kv_cache_dtype)
    weights = _core.read_model_info(str(folder)).weight_bytes
    (row,) = plan(str(folder), weights + found.cache_bytes, [kv_cache_dtype], LENGTH)["formats"]
    assert found.sequences == row["sequences"] == int(sequences)
    if found.smaller is not None:
        name, held = found.smaller
        (row,) = plan(str(folder), weights + found.cache_bytes, [name], LENGTH)["formats"]
        assert held == row["sequences"] >= found.sequences


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
def test_the_scheduler_runs_as_many_sequences(folder: Path, kv_cache_dtype: str) -> None:
    options: dict[str, Any] = {
        "kv_cache_dtype": kv_cache_dtype,
        "max_model_len": LENGTH,
        "threads": 1,
        "enable_prefix_caching": False,
    }
    layout = _core.plan_cache_bytes(engine_config(str(folder), options))
    llm = LLM(folder, kv_cache_memory_bytes=3 * layout.sequence_bytes, **options)
    assert llm._loaded.summary().sequences == 3
    params = SamplingParams(max_tokens=LENGTH - 8, ignore_eos=True, temperature=0.0)
    preempted = []
    for count in (3, 4):
        llm.generate([{"prompt_token_ids": [1, *range(10 + i, 17 + i)]} for i in range(count)], params, use_tqdm=False)
        preempted.append(llm.stats()["preemptions"] > 0)
    assert preempted == [False, True]


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Qwen3_5", "GptOss"])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "bf16"])
def test_tokens_are_those_of_plan(name: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    """... for models with several groups, whose windows and states no count of bytes per token knows."""
    make = tiny_classes.MULTIMODAL.get(name, partial(tiny_models.make_model, name))
    tiny_models.save(make(), tmp_path)
    options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "max_model_len": 192, "threads": 1}
    layout = _core.plan_cache_bytes(engine_config(str(tmp_path), options))
    cache_bytes = int(5.5 * layout.sequence_bytes)
    weights = _core.read_model_info(str(tmp_path)).weight_bytes
    (row,) = plan(str(tmp_path), weights + cache_bytes, [kv_cache_dtype], 192)["formats"]
    for max_num_seqs, tokens in ((8, 5.5 * 192 // 64 * 64), (4, 4 * 192)):
        sizes = {"kv_cache_memory_bytes": cache_bytes, "max_num_seqs": max_num_seqs}
        engine = _core.Engine(engine_config(str(tmp_path), {**options, **sizes}))
        found = summarize(engine.config, engine.info, {"kv_cache_dtype": kv_cache_dtype, **engine.stats()}, {})
        assert found.sequences == row["sequences"] == 5
        assert found.tokens == tokens


def test_repr_is_the_line_of_the_log(folder: Path) -> None:
    llm = LLM(folder, kv_cache_dtype="int8", kv_cache_memory_bytes="4MiB", max_num_seqs=2, max_model_len=512, threads=1)
    found = llm._loaded.summary()
    assert repr(llm) == f"LLM({str(folder)!r}: {found})"
    assert "\n" not in repr(llm)
    assert str(found).startswith(f"{llm.stats()['backend']}, 1 thread; weights ")
    assert "; cache int8, 4.0 MiB: " in str(found)
    name, held = found.smaller or ("", 0)
    sequences = f"{found.sequences:,} sequences of 512 tokens, of which 2 run at once"
    assert str(found).endswith(f": {sequences} ({name} would hold {held})")
    assert not found.limited


def test_summary_says_what_decided_on_the_size(folder: Path) -> None:
    llm = LLM(folder, max_model_len=64, threads=1, max_num_seqs=3)
    config, stats = llm.config, llm._loaded.stats()
    assert not llm._loaded.summary().limited  # memory for 3 sequences is there
    config.kv_cache_memory_bytes = 2 * _core.plan_cache_bytes(config).sequence_bytes
    found = summarize(config, llm.model_info, stats, {})
    assert (found.sequences, found.limited) == (2, True)
    assert " (40 % of the free memory): 2 sequences of 64 tokens" in str(found)
    for name in ("kv_cache_memory_bytes", "max_total_tokens", "num_gpu_blocks_override"):
        assert not summarize(config, llm.model_info, stats, {name: 128}).limited


def test_summary_of_processes_replicas_and_ram(folder: Path) -> None:
    llm = LLM(folder, max_model_len=64, threads=1, max_num_seqs=1)
    stats = llm._loaded.stats()
    host = {**stats["host"], "enabled": True, "limit_bytes": 1000 * stats["bytes_per_token"]}
    text = str(summarize(llm.config, llm.model_info, {**stats, "host": host, "replicas": 3}, {}))
    assert text.startswith("3 replicas, each on cpu")
    found = summarize(llm.config, llm.model_info, {**stats, "replicas": 3}, {})
    assert found.all_tokens == 3 * found.tokens == 3 * 64
    assert text.endswith(", and 1,000 tokens in RAM")
    found = dataclasses.replace(llm._loaded.summary(), processes=2)
    assert str(found).startswith("2 processes, each on cpu")


@pytest.mark.parametrize(
    ("weight_dtype", "expected"),
    [("auto", "weights float32, "), ("int8", "weights int8, "), ("bf16", "weights bf16, ")],
)
def test_summary_names_the_storage_of_the_weights(folder: Path, weight_dtype: str, expected: str) -> None:
    assert expected in repr(LLM(folder, max_model_len=64, threads=1, weight_dtype=weight_dtype, dtype="auto"))
