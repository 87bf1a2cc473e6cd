"""plan, eval, calibrate and serve on a tiny random checkpoint of every architecture; plan on every example config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_classes
import tiny_models
import torch
from live_server import live_server

from kvanta import LLM, _core
from kvanta.checkpoint.resolve import SHIPPED, example_configs
from kvanta.cli import main

ENGINE = ["--threads", "1", "--kv-cache-memory-bytes", "8MiB"]


@pytest.fixture(scope="module", params=_core.architectures())
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a class that models.cc lists: a new one needs a model in tiny_models."""
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    # Random weights make tokens that rounding selects matter as much as any: nearly all are selected.
    model = tiny_classes.make_of_class(name, vocab_size=512, index_topk=120, **tiny_classes.experts(16, 2))
    tiny_models.save(model, folder, torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [name]
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED / "stories260k" / file, folder / file)
    return folder


def report(*words: str | Path) -> dict[str, Any]:
    """The JSON that a command writes."""
    *_, out = words
    assert main([*map(str, words[:-1]), "--json", str(out)]) == 0
    result: dict[str, Any] = json.loads(Path(out).read_text())
    return result


@pytest.mark.rotation("folder", 3, 0)
def test_plan_and_calibrate(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = report("plan", folder, "--memory", "1GiB", "--context", "128", tmp_path / "plan.json")
    names = {row["name"] for row in planned["formats"]}
    assert {"bf16", "fp32"} < names
    scales = tmp_path / "scales.json"
    options: dict[str, Any] = {"threads": 1, "kv_cache_memory_bytes": "8MiB", "max_model_len": 128}
    words = ["calibrate", str(folder), "--tokens", "96", "--granularity", "head", "--out", str(scales), *ENGINE]
    if "mla_fp8" in names:
        assert main(words) == 2
        assert "stores latents (MLA), whose formats have no scales to calibrate" in capsys.readouterr().err
        llm = LLM(folder, kv_cache_dtype="fp8", **options)
    else:
        calibrated = report(*words, tmp_path / "calibrated.json")
        llm = LLM(folder, kv_cache_dtype="fp8", quantization_param_path=str(scales), **options)
        assert len(calibrated["layers"]) == llm.model_info.layers
    # The gate of a shared expert is one row of a panel of 16, and Phimoe's routers are two here; AMX's panels have 32,
    # and latents 80 rows.
    padded = 1.03 if llm.stats()["isa"] == "amx" else 1.02
    assert planned["weight_bytes"] <= llm.stats()["weight_bytes"] < padded * planned["weight_bytes"]
    assert np.isfinite(llm.logits(range(3, 90))).all()


@pytest.mark.rotation("folder", 3, 1)
def test_eval(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path))
    words = ["--formats", "int8", "int4", "--context", "128", "--tokens", "128"]
    rows = report("eval", folder, *words, *ENGINE, tmp_path / "eval.json")["formats"]
    assert rows.keys() == {"int8", "int4"}
    limit = 3 if folder.name.startswith("DeepseekV4") else 1  # the former has no exact pages
    for row in rows.values():
        assert 0 < row["kl_mean"] < limit, rows  # of random weights; one row that gets another expert is most of it
    assert rows["int8"]["bits_per_element"] > rows["int4"]["bits_per_element"]


@pytest.mark.rotation("folder", 3, 2)
def test_serve(folder: Path) -> None:
    llm = LLM(folder, threads=1, kv_cache_memory_bytes="8MiB", max_model_len=128)
    logits = llm.logits([1, 5, 6, 7])[-1]
    with live_server(model=str(folder), options={"max_model_len": 128}) as server:
        answer = server.completion(prompt=[1, 5, 6, 7], max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=1)
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7} | answer["usage"]
    assert answer["choices"][0]["logprobs"]["tokens"][0] == llm.tokenizer.token_text(int(logits.argmax()))


@pytest.mark.parametrize("name", example_configs())
def test_plan_of_an_example_config(name: str, tmp_path: Path) -> None:
    planned = report("plan", name, tmp_path / "plan.json")
    assert planned["formats"]
    assert all(row["tokens"] > 0 for row in planned["formats"])
