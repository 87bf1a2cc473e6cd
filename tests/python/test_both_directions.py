"""EmbeddingGemma, whose tokens attend to later ones: embeddings against transformers; the same bits in any batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf_models
import numpy as np
import pytest
import safetensors.torch
import tiny_models
import tolerance
import torch
from live_server import live_server
from logits_oracle import largest_error
from numpy.typing import NDArray
from tiny_gguf import rewrite

from kvanta import LLM, InputError, PoolingParams
from kvanta.checkpoint.resolve import SHIPPED

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "use_bidirectional_attention": True,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}
OPTIONS: dict[str, Any] = {
    "tokenizer": "stories260k",
    "dtype": "float32",
    "kv_cache_dtype": "fp32",
    "kv_cache_memory_bytes": "64MiB",
    "threads": 2,
}
PROMPTS = [np.random.default_rng(length).integers(3, 512, length).tolist() for length in (130, 1, 1100, 25)]
RAW = PoolingParams(pooling_type="mean", normalize=False)


def save(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """The text model alone, as it is published; returns it."""
    model: Any = tiny_models.make_model("Gemma3", **{**SIZES, **settings}).base_model
    tiny_models.save(model, folder, dtype)
    return model


def states(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        hidden: torch.Tensor = model(torch.tensor(prompt)[None]).last_hidden_state[0]
    return hidden


def arrays(llm: LLM, prompts: list[list[int]], params: PoolingParams = RAW) -> list[NDArray[np.float32]]:
    return [output.outputs.data for output in llm.encode(prompts, params)]


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 7}, {"sliding_window": 4096, "head_dim": 24}])
def test_embeddings_equal_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    model = save(tmp_path, **settings)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Gemma3TextModel"]
    assert config["sliding_window"] // 2 + 1 == model.config.sliding_window
    llm = LLM(tmp_path, **OPTIONS)
    for kind in ("mean", "last"):
        found = arrays(llm, PROMPTS, PoolingParams(pooling_type=kind, normalize=False))
        for prompt, pooled in zip(PROMPTS, found, strict=True):
            expected = states(model, prompt)
            expected = expected.double().mean(0).float() if kind == "mean" else expected[-1]
            assert largest_error(pooled, expected.numpy()) < tolerance.F32_LOGITS


def test_later_tokens_count(tmp_path: Path) -> None:
    """The first state is another without the tokens after it: the comparison above needs both directions."""
    model = save(tmp_path)
    prompt = PROMPTS[0]
    assert largest_error(states(model, prompt)[0].numpy(), states(model, prompt[:1])[0].numpy()) > 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("embedding_gemma")
    save(made, torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED / "stories260k" / name, made / name)
    return made


@pytest.mark.parametrize("cache", ["bf16", "int8", "int4+exact=2", "kivi4"])
def test_batches_threads_and_repetition_change_no_bit(cache: str, folder: Path) -> None:
    options = OPTIONS | {"dtype": "auto", "kv_cache_dtype": cache}
    llm = LLM(folder, **options, max_num_batched_tokens=64)
    alone = [arrays(llm, [prompt])[0] for prompt in PROMPTS]
    for other in (llm, LLM(folder, **options | {"threads": 1})):
        for expected, found in zip(alone, arrays(other, PROMPTS), strict=True):
            np.testing.assert_array_equal(expected, found)
    # No page is reused: those of a prompt depend on what comes after them.
    longer = PROMPTS[0] + PROMPTS[3]
    last = PoolingParams(pooling_type="last")
    (extended,) = llm.encode([longer], last)
    assert extended.num_cached_tokens == 0
    np.testing.assert_array_equal(arrays(LLM(folder, **options), [longer], last)[0], extended.outputs.data)


def test_ranks_give_the_bits_of_one_process(folder: Path) -> None:
    options = OPTIONS | {"kv_cache_dtype": "int8"}
    expected = arrays(LLM(folder, **options), PROMPTS)
    for found, one in zip(arrays(LLM(folder, **options, tensor_parallel_size=2), PROMPTS), expected, strict=True):
        np.testing.assert_array_equal(found, one)


def test_a_small_cache_computes_prompts_one_after_another(folder: Path) -> None:
    llm = LLM(folder, **OPTIONS, max_model_len=1200)
    small = LLM(folder, **OPTIONS | {"kv_cache_memory_bytes": "3MiB"}, max_model_len=1200)
    prompts = [prompt + [5] * 40 for prompt in PROMPTS] * 3
    for expected, found in zip(arrays(llm, prompts), arrays(small, prompts), strict=True):
        np.testing.assert_array_equal(expected, found)


def store_dense(folder: Path, name: str, shape: tuple[int, int], bias: bool, activation: str) -> torch.nn.Module:
    """Writes a module; returns what it computes."""
    linear = torch.nn.Linear(shape[1], shape[0], bias=bias)
    tensors = {f"linear.{key}": value for key, value in linear.state_dict().items()}
    (folder / name).mkdir()
    safetensors.torch.save_file(tensors, folder / name / "model.safetensors")
    config = {
        "in_features": shape[1],
        "out_features": shape[0],
        "bias": bias,
        "activation_function": f"torch.nn.modules.{activation}",
    }
    (folder / name / "config.json").write_text(json.dumps(config))
    return torch.nn.Sequential(linear, torch.nn.Tanh() if activation.endswith("Tanh") else torch.nn.Identity())


KINDS = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Dense": "Dense", "4_Normalize": "Normalize"}


def with_modules(folder: Path) -> torch.nn.Module:
    """Adds the modules of sentence-transformers; returns the dense ones."""
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(KINDS.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    torch.manual_seed(3)
    return torch.nn.Sequential(
        store_dense(folder, "2_Dense", (96, 64), True, "activation.Tanh"),
        store_dense(folder, "3_Dense", (80, 96), False, "linear.Identity"),
    )


def test_dense_modules(tmp_path: Path) -> None:
    model = save(tmp_path)
    dense = with_modules(tmp_path)
    llm = LLM(tmp_path, **OPTIONS)
    prompt = PROMPTS[0]
    with torch.no_grad():
        projected = dense(states(model, prompt).mean(0))
    for dimensions in (None, 48):
        expected = torch.nn.functional.normalize(projected[:dimensions], dim=0)
        (found,) = llm.encode([prompt], PoolingParams(dimensions=dimensions))
        assert found.outputs.data.shape == expected.shape
        assert largest_error(found.outputs.data, expected.numpy()) < tolerance.F32_LOGITS
    with pytest.raises(InputError, match="dimensions = 81: must be between 1 and the model's hidden size, 80"):
        llm.encode([prompt], PoolingParams(dimensions=81))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("2_Dense/config.json", {"in_features": 63}, "in_features' is 63; expected 64, the channels"),
        ("3_Dense/config.json", {"activation_function": "torch.nn.GELU"}, "torch's Identity or Tanh"),
        ("3_Dense/config.json", {"out_features": 81}, r"linear.weight' has shape \[80, 96\]"),
        ("3_Dense/config.json", {"bias": True}, "linear.bias"),
    ],
)
def test_bad_modules(file: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path)
    with_modules(tmp_path)
    config = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(config | change))
    with pytest.raises(InputError, match=message):
        LLM(tmp_path, **OPTIONS)


def test_the_server_embeds(folder: Path) -> None:
    with live_server(model=str(folder), kv_cache_dtype="fp32", options={"dtype": "float32"}) as server:
        inputs = [PROMPTS[0], PROMPTS[3]]
        answer = server.post("/v1/embeddings", input=inputs, encoding_format="float").json()
        refused = server.post("/v1/completions", prompt="Once", model="tiny")
    expected = LLM(folder, **OPTIONS).embed(inputs)
    assert [each["embedding"] for each in answer["data"]] == [each.outputs.embedding for each in expected]
    assert refused.status_code == 400
    assert "its model embeds texts" in refused.text


GGUF: dict[str, Any] = {
    "use_bidirectional_attention": True,
    "num_hidden_layers": 6,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 32,  # not in the file: the size of a head
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("with_dense", [False, True])
def test_gguf_files(with_dense: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))
    source = gguf_models.make_source(tmp_path / "source", "Gemma3", **GGUF)
    source.other_arch = "GEMMA_EMBEDDING"
    file = gguf_models.write(source, tmp_path / "m.gguf")
    random = np.random.default_rng(4)
    shapes = {"dense_2.weight": (96, 64), "dense_3.weight": (80, 96)} if with_dense else {}
    dense = {name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    name = "gemma-embedding"
    keys = {"general.architecture": name, f"{name}.pooling_type": 1, f"{name}.attention.causal": False}
    rewrite(file, keys, dense)
    model: Any = tiny_models.load(source.folder, torch.float32).base_model
    prompt = random.integers(3, gguf_models.VOCAB, 130).tolist()
    expected = states(model, prompt).double().mean(0)
    for matrix in dense.values():
        expected = torch.from_numpy(matrix).double() @ expected
    expected = torch.nn.functional.normalize(expected, dim=0).float()
    llm = LLM(file, **{key: value for key, value in OPTIONS.items() if key != "tokenizer"})
    (found,) = llm.encode([prompt])
    assert largest_error(found.outputs.data, expected.numpy()) < tolerance.F32_LOGITS
    with pytest.raises(InputError, match="its model embeds texts"):
        llm.generate([prompt])


def test_what_needs_one_direction_is_refused(folder: Path, tmp_path: Path) -> None:
    llm = LLM(folder, **OPTIONS, max_model_len=200, max_num_batched_tokens=64)
    assert not llm.model_info.has_lm_head
    with pytest.raises(InputError, match="its model embeds texts"):
        llm.generate([PROMPTS[0]])
    with pytest.raises(InputError, match="the prompt has 1100 tokens, max_model_len is 200"):
        llm.encode([PROMPTS[2]], RAW)
    for options in ({"kv_cache_dir": str(tmp_path)}, {"pipeline_parallel_size": 2}):
        with pytest.raises(InputError, match=f"{next(iter(options))}: not supported by Gemma3ForCausalLM"):
            LLM(folder, **OPTIONS, **options)
    with pytest.raises(InputError, match=r"attention in both directions is without latents, ages"):
        LLM(folder, **OPTIONS | {"kv_cache_dtype": "0=int8,128=int4"})
