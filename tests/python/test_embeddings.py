"""LLM.embed, encode and score: transformers' hidden states, pooled; the same bits in any batch and chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import tolerance
import torch
from logits_oracle import TOKENS, largest_error
from numpy.typing import NDArray
from tiny_checkpoints import write_checkpoint

from kvanta import LLM, InputError, PoolingParams
from kvanta.checkpoint.pooler_config import default_pooling, read_pooler_config
from kvanta.engine.embedding import cosine

# Granite divides its logits, Gemma scales its embeddings, Qwen 3 norms queries and keys.
ARCHITECTURES = ["Llama", "Granite", "Gemma2", "Qwen3"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pooled_states_equal_transformers(architecture: str, tmp_path: Path) -> None:
    model = tiny_models.make_model(architecture)
    tiny_models.save(model, tmp_path)
    with torch.no_grad():
        states: torch.Tensor = model.base_model(torch.from_numpy(TOKENS.astype(np.int64))[None]).last_hidden_state[0]
    llm = LLM(tmp_path, tokenizer="stories260k", dtype="float32", kv_cache_dtype="fp32", max_num_batched_tokens=64)
    expected = {"mean": states.double().mean(0), "last": states[-1].double()}
    for kind, pooled in expected.items():
        (raw,) = llm.encode(TOKENS.tolist(), PoolingParams(pooling_type=kind, normalize=False))
        assert largest_error(raw.outputs.data, pooled.float().numpy()) < tolerance.F32_LOGITS
        (cut,) = llm.embed(TOKENS.tolist(), pooling_params=PoolingParams(pooling_type=kind, dimensions=20))
        unit = torch.nn.functional.normalize(pooled[:20], dim=0)
        assert cut.outputs.hidden_size == 20
        assert largest_error(np.asarray(cut.outputs.embedding, np.float32), unit.float().numpy()) < tolerance.F32_LOGITS


def arrays(llm: LLM, prompts: list[Any], params: PoolingParams | None = None) -> list[NDArray[np.float32]]:
    return [output.outputs.data for output in llm.encode(prompts, params)]


def test_batch_chunks_and_prefix_hits_change_no_bit(llm: LLM) -> None:
    chunked = LLM(
        "stories260k", kv_cache_memory_bytes="8MiB", max_num_batched_tokens=64, enable_prefix_caching=False, threads=2
    )
    text = "Lily had a cat and a dog. " * 20
    prompts = [text[:length] for length in (400, 3, 120, 57)]
    for kind in ("mean", "last"):
        params = PoolingParams(pooling_type=kind)
        alone = [arrays(llm, [prompt], params)[0] for prompt in prompts]
        np.testing.assert_array_equal(alone, arrays(llm, prompts, params))
        np.testing.assert_array_equal(alone, arrays(chunked, prompts, params))
    (hit,) = llm.encode(prompts[0], PoolingParams(pooling_type="last"))
    assert hit.num_cached_tokens >= 64
    (whole,) = llm.encode(prompts[0], PoolingParams(pooling_type="last", skip_reading_prefix_cache=True))
    assert whole.num_cached_tokens == 0
    np.testing.assert_array_equal(hit.outputs.data, alone[0])
    assert llm.encode(prompts[0], PoolingParams(pooling_type="mean"))[0].num_cached_tokens == 0


def test_outputs(llm: LLM) -> None:
    prompts: list[Any] = ["Once upon", {"prompt_token_ids": [1, 403]}]
    outputs = llm.embed(prompts)
    assert [output.prompt_token_ids for output in outputs] == [llm.tokenizer.encode("Once upon"), [1, 403]]
    assert all(output.finished and len(output.outputs.embedding) == 64 for output in outputs)
    assert np.linalg.norm(outputs[0].outputs.embedding) == pytest.approx(1, abs=1e-6)
    (array,) = llm.encode("Once upon")
    assert array.outputs.data.tolist() == outputs[0].outputs.embedding
    assert array.outputs.data.dtype == np.float32
    cut = llm.embed("Once upon a time", pooling_params=PoolingParams(truncate_prompt_tokens=2))[0]
    assert cut.prompt_token_ids == llm.tokenizer.encode("Once upon a time")[-2:]
    both = llm.encode(["Once", "upon"], [PoolingParams(pooling_type="mean"), PoolingParams(pooling_type="last")])
    mean = llm.encode("Once", PoolingParams(pooling_type="MEAN"))[0]
    np.testing.assert_array_equal(both[0].outputs.data, mean.outputs.data)


def test_a_prompt_may_fill_the_context(llm: LLM) -> None:
    limit = llm.config.max_model_len
    assert len(llm.embed([5] * limit)[0].prompt_token_ids) == limit
    with pytest.raises(InputError, match=f"the prompt has {limit + 1} tokens, max_model_len is {limit}"):
        llm.embed([5] * (limit + 1))
    assert (
        len(llm.embed([5] * (limit + 9), pooling_params=PoolingParams(truncate_prompt_tokens=-1))[0].prompt_token_ids)
        == limit
    )


def test_texts_are_the_same_next_to_embeddings(llm: LLM, story: list[int]) -> None:
    from stories import GREEDY, PROMPT

    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    llm.embed(["Lily had a cat."] * 3)
    *_, (_, output) = stream
    assert output.outputs[0].token_ids == story


def test_scores(llm: LLM) -> None:
    query, documents = "Once upon a time", ["Once upon a time", "There was a dog", "zzz"]
    one_to_many = llm.score(query, documents)
    first, *others = llm.encode([query, *documents])
    assert [pair.outputs.score for pair in one_to_many] == [
        cosine(first.outputs.data, other.outputs.data) for other in others
    ]
    assert one_to_many[0].outputs.score == pytest.approx(1, abs=1e-6)
    assert one_to_many[2].outputs.score < 0.9
    assert one_to_many[1].prompt_token_ids == first.prompt_token_ids + others[1].prompt_token_ids
    pairs = llm.score([query, query], documents[:2])
    assert [pair.outputs for pair in pairs] == [pair.outputs for pair in one_to_many[:2]]
    raw = llm.score(query, documents, pooling_params=PoolingParams(normalize=False))
    np.testing.assert_allclose(
        [pair.outputs.score for pair in raw], [pair.outputs.score for pair in one_to_many], atol=1e-6
    )
    with pytest.raises(InputError, match="pairs, or one text and several, got 2 and 3 texts"):
        llm.score([query, query], documents)


def test_cosine() -> None:
    a, b = np.asarray([3, 4], np.float32), np.asarray([-4, 3], np.float32)
    assert (cosine(a, a), cosine(a, -a), cosine(a, b), cosine(a, 0 * a)) == (1, -1, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pooling_type": "CLS"}, "pooling_type must be one of mean, last, got 'CLS': the first token"),
        ({"pooling_type": 3}, "pooling_type must be one of mean, last, got 3"),
        ({"normalize": "yes"}, "normalize must be True or False"),
        ({"normalize": True, "use_activation": False}, "normalize and use_activation are the same"),
        ({"dimensions": 0}, "dimensions must be a whole number in 1.."),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be a whole number in 1.."),
        ({"softmax": True}, "softmax is not supported, got True: models have no classification head"),
        ({"task": "classify"}, "task is not supported, got 'classify'"),
    ],
)
def test_wrong_parameters(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PoolingParams(**wrong)


def test_wrong_calls(llm: LLM) -> None:
    with pytest.raises(InputError, match="dimensions = 65: must be between 1 and the model's hidden size, 64"):
        llm.embed("a", pooling_params=PoolingParams(dimensions=65))
    with pytest.raises(InputError, match="pooling_params must be a PoolingParams or a list of them, got 3"):
        llm.embed("a", pooling_params=3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="pooling_task must be embed, got 'classify'"):
        llm.encode("a", pooling_task="classify")
    with pytest.raises(InputError, match="the prompt is empty"):
        llm.embed(["a", ""])


def store_modules(folder: Path, mode: str, *, normalize: bool) -> None:
    """Files of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"path": f"{index}_{kind}", "type": f"sentence_transformers.models.{kind}"} for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**modes, mode: True}))


def test_the_model_says_how_to_pool(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    assert default_pooling(folder, PoolingParams()) == PoolingParams(pooling_type="last", normalize=True)
    store_modules(folder, "pooling_mode_mean_tokens", normalize=False)
    given: dict[str, Any] = {"kv_cache_memory_bytes": "8MiB", "threads": 1}
    llm = LLM(folder, **given)
    stored = llm.encode("Once")[0].outputs.data
    np.testing.assert_array_equal(
        stored, llm.encode("Once", PoolingParams(pooling_type="mean", normalize=False))[0].outputs.data
    )
    assert np.linalg.norm(stored) != pytest.approx(1, abs=1e-3)
    configured = LLM(folder, pooler_config={"pooling_type": "LAST", "normalize": True}, **given)
    np.testing.assert_array_equal(
        configured.encode("Once")[0].outputs.data,
        llm.encode("Once", PoolingParams(pooling_type="last", normalize=True))[0].outputs.data,
    )
    store_modules(folder, "pooling_mode_cls_token", normalize=True)
    with pytest.raises(InputError, match="pooling_mode_cls_token; supported: pooling_mode_mean_tokens"):
        LLM(folder, **given)
    assert default_pooling(folder, PoolingParams(pooling_type="mean")) == PoolingParams(
        pooling_type="mean", normalize=True
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pooling_type": "CLS"}, "pooler_config: pooling_type must be one of mean, last"),
        ({"pooling": "MEAN"}, "pooler_config has 'pooling'; known: pooling_type, "),
        ({"logit_mean": 0.5}, "pooler_config: logit_mean is not supported, got 0.5"),
        ({"pooling_type": "MEAN", "seq_pooling_type": "LAST"}, "pooler_config: seq_pooling_type is given twice"),
    ],
)
def test_wrong_pooler_config(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_pooler_config(config)


def test_more_dimensions_than_the_model_has() -> None:
    with pytest.raises(InputError, match="pooler_config: dimensions must be at most the hidden size, 64, got 65"):
        LLM("stories260k", kv_cache_memory_bytes="8MiB", pooler_config='{"dimensions": 65}')


def test_pooler_config() -> None:
    config = {"seq_pooling_type": "MEAN", "use_activation": False, "dimensions": 8, "enable_chunked_processing": False}
    assert read_pooler_config({**config, "task": "embed", "max_embed_len": None}) == PoolingParams(
        pooling_type="mean", normalize=False, dimensions=8
    )
