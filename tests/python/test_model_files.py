"""Files of models as people have them: read as transformers and vLLM read them, and the same facts everywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from test_special_tokens import change

from kvanta import LLM, InputError, SamplingParams, _core
from kvanta.checkpoint.facts import model_facts
from kvanta.checkpoint.resolve import SHIPPED, resolve_model

SMALL = {"kv_cache_memory_bytes": "8MiB"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
Tensors = dict[str, NDArray[Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped model."""
    return Path(shutil.copytree(SHIPPED / "stories260k", tmp_path / "model"))


def tokens_of(model: Path | str, params: SamplingParams = GREEDY) -> list[int]:
    (answer,) = LLM(model, **SMALL).generate("Once upon a time", params)
    return list(answer.outputs[0].token_ids)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return tokens_of("stories260k")


def test_a_text_ends_at_the_tokenizers_token_too(folder: Path, expected: list[int]) -> None:
    """Fine-tunes for chats often have the base model's token in config.json (QwenLM/Qwen3#927)."""
    last = expected[3]
    text = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    change(folder / "tokenizer_config.json", eos_token=next(word for word, token in text.items() if token == last))
    change(folder / "config.json", eos_token_id=7)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9]}')
    llm = LLM(folder, **SMALL)
    (answer,) = llm.generate("Once upon a time", GREEDY)
    assert answer.outputs[0].token_ids[-1] == last
    assert answer.outputs[0].finish_reason == "stop"
    assert len(answer.outputs[0].token_ids) == expected.index(last) + 1
    assert llm.model_info.eos_token_ids == [7, 9, last]
    (ends,) = [fact for fact in model_facts(folder).facts if fact.name == "end tokens"]
    assert ends.source == "config.json, generation_config.json, tokenizer_config.json"
    assert f"({last})" in ends.value


CONFIGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no architectures": lambda config: config.pop("architectures"),
    "empty architectures": lambda config: config.update(architectures=[]),
    "the known one is second": lambda config: config.update(architectures=["OwnLM", "LlamaForCausalLM"]),
    "LLaMAForCausalLM": lambda config: config.update(architectures=["LLaMAForCausalLM"]),
    "torch.float32": lambda config: config.update(torch_dtype="torch.float32"),
    "dtype auto": lambda config: config.update(torch_dtype="auto"),
    "dtype float64": lambda config: config.update(torch_dtype="float64"),
    "bos -1": lambda config: config.update(bos_token_id=-1),
    "bos beyond": lambda config: config.update(bos_token_id=70_000),
    "bos list": lambda config: config.update(bos_token_id=[1, 2]),
    "eos -1": lambda config: config.update(eos_token_id=-1),
    "eos beyond": lambda config: config.update(eos_token_id=[2, 70_000]),
    "bitsandbytes off": lambda config: config.update(
        quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}
    ),
    "quantization_config {}": lambda config: config.update(quantization_config={}),
    "no max_position_embeddings": lambda config: config.pop("max_position_embeddings"),
    "max_position_embeddings 1e9": lambda config: config.update(max_position_embeddings=1_000_000_000),
    "Infinity": lambda config: config.update(time_step_limit=[0.0, float("inf"), float("nan"), -float("inf")]),
    "mrope": lambda config: config.update(rope_scaling={"rope_type": "mrope", "mrope_section": [1, 1, 2]}),
}


@pytest.mark.parametrize("spoil", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_config_json_that_others_read(
    spoil: Callable[[dict[str, Any]], Any], folder: Path, expected: list[int]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    spoil(config)
    (folder / "config.json").write_text(json.dumps(config))
    llm = LLM(folder, max_model_len=128, **SMALL)
    (answer,) = llm.generate("Once upon a time", GREEDY)
    assert list(answer.outputs[0].token_ids) == expected


def test_of_a_key_that_appears_twice_the_last_counts(folder: Path, expected: list[int]) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{"hidden_size": 1, "torch_dtype": "half",', 1))
    assert json.loads((folder / "config.json").read_text())["hidden_size"] != 1
    assert tokens_of(folder) == expected


def test_infinity_where_a_number_is_needed_is_named(folder: Path) -> None:
    change(folder / "config.json", rms_norm_eps=float("inf"))
    with pytest.raises(InputError, match="rms_norm_eps' is 'Infinity'; expected a number"):
        LLM(folder)
    change(folder / "config.json", architectures=["FooForCausalLM"])
    with pytest.raises(InputError, match="unknown architecture 'FooForCausalLM'"):
        LLM(folder)


@pytest.mark.parametrize("key", ["is_causal"])
def test_attention_in_both_directions_is_refused(key: str, folder: Path) -> None:
    """Embeddings would be wrong (gte-Qwen2)."""
    change(folder / "config.json", **{key: False})
    with pytest.raises(InputError, match="is_causal' is false; expected true: attention in both directions"):
        LLM(folder)


def rewrite(folder: Path, change_tensors: Callable[[Tensors], Tensors], name: str = "model.safetensors") -> None:
    """Writes the weights again."""
    tensors = change_tensors(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / name)


def with_rope_tables(tensors: Tensors) -> Tensors:
    table = np.zeros((4, 4), np.float32)
    return tensors | {f"model.layers.0.self_attn.rotary_emb.{name}_cached": table for name in ("cos", "sin")}


def without_prefix(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): value for name, value in tensors.items()}


def head_alone(tensors: Tensors) -> Tensors:
    embeddings = tensors.pop("model.embed_tokens.weight")
    return {**tensors, "lm_head.weight": embeddings}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (with_rope_tables, "model.safetensors"),
        (without_prefix, "model.safetensors"),
        (head_alone, "model.safetensors"),
        (dict, "model-00001-of-00001.safetensors"),
        (dict, "gptq_model-4bit-128g.safetensors"),
    ],
    ids=["rope tables", "no prefix", "lm_head alone", "a single shard", "another name"],
)
def test_weights_that_others_read(
    changed: Callable[[Tensors], Tensors], name: str, folder: Path, expected: list[int]
) -> None:
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    rewrite(folder, changed, name)
    assert tokens_of(folder) == expected
    assert model_facts(folder).loads


def test_an_index_with_stale_entries(folder: Path, expected: list[int]) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    files = [f"model-{part:05d}-of-00002.safetensors" for part in (1, 2)]
    index = {"lm_head.weight": files[0]}  # taken out, since it is tied
    for file, part in zip(files, parts, strict=True):
        index |= dict.fromkeys(part, file)
        save_file({name: tensors[name] for name in part}, folder / file)
    index[parts[0][0]] = files[1]  # in the other shard
    stale = parts[1][0]
    save_file({**{name: tensors[name] for name in parts[0]}, stale: np.zeros_like(tensors[stale])}, folder / files[0])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert tokens_of(folder) == expected


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForCausalLM"])
def test_a_model_for_embeddings_has_no_output_matrix(name: str, folder: Path) -> None:
    """Qwen3-Embedding-8B, e5-mistral: no lm_head, and tensors without "model."."""
    change(folder / "config.json", architectures=[name], tie_word_embeddings=False)
    rewrite(folder, without_prefix)
    llm = LLM(folder, **SMALL)
    assert not llm.model_info.has_lm_head
    (own,) = llm.embed("Once upon a time")
    (whole,) = LLM("stories260k", **SMALL).embed("Once upon a time")
    assert own.outputs.embedding == whole.outputs.embedding
    with pytest.raises(InputError, match=r"no lm_head\.weight: its model embeds texts"):
        llm.generate("Once", GREEDY)


def test_the_hubs_cache_folder_one_level_up(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "models--org--name"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0123abcd")
    shutil.copytree(folder, root / "snapshots" / "0123abcd")
    assert resolve_model(root).path == root / "snapshots" / "0123abcd"


def test_weights_in_another_layout_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    with pytest.raises(InputError, match="maker's own layout alone"):
        LLM(folder)
    (folder / "consolidated.safetensors").rename(folder / "model-Q4_K_M.gguf")
    with pytest.raises(InputError, match=r"in GGUF files: give one of them, such as .*model-Q4_K_M\.gguf"):
        LLM(folder)


def test_a_broken_template_keeps_nothing_from_loading(folder: Path, expected: list[int]) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}")
    assert tokens_of(folder) == expected
    facts = model_facts(folder)
    assert facts.loads
    assert "chat_template.jinja" in facts.problems[0]
    llm = LLM(folder, chat_template="{{ messages[0].content }}", **SMALL)
    assert llm.chat([{"role": "user", "content": "Once upon a time"}], GREEDY)[0].outputs[0].token_ids


def test_info_of_the_files_alone(folder: Path) -> None:
    assert _core.read_model_info(str(folder)).has_lm_head
