"""Latents, or compressed entries, divided among the ranks of tensor parallelism: the bits of one process, and a part of
its pages on each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from divided_models import assert_same_bits, compute, gguf_file, saved

from kvanta import LLM, InputError, SamplingParams

FORMATS = ["bf16", "mla_fp8", "mla_int8", "mla_int4", "mla_nvfp4", "mla_int4+exact=2+sink=1"]


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_ranks_give_the_bits_of_one_process(kv_cache_dtype: str, tmp_path: Path) -> None:
    model = saved("DeepseekV3", tmp_path)
    expected = compute(model, 1, kv_cache_dtype=kv_cache_dtype)
    for size in (2, 4):
        ranks = {"tensor_parallel_size": size, "decode_context_parallel_size": size}
        assert_same_bits(compute(model, size, kv_cache_dtype=kv_cache_dtype, **ranks), expected)
    whole = compute(model, 2, kv_cache_dtype=kv_cache_dtype, tensor_parallel_size=2)  # latents in every rank
    assert_same_bits(whole, expected)


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8", "int8", "int4", "nvfp4"])
def test_ranks_divide_compressed_entries(kv_cache_dtype: str, tmp_path: Path) -> None:
    model = saved("DeepseekV4", tmp_path)
    expected = compute(model, 1, kv_cache_dtype=kv_cache_dtype)
    for size in (2, 4):
        ranks = {"tensor_parallel_size": size, "decode_context_parallel_size": size}
        assert_same_bits(compute(model, size, kv_cache_dtype=kv_cache_dtype, **ranks), expected)


def test_gguf_files_and_experts_by_rank(tmp_path: Path) -> None:
    model = gguf_file(tmp_path, "DeepseekV3", "F32")
    ranks: dict[str, Any] = {"tensor_parallel_size": 4, "dcp_size": 4, "enable_expert_parallel": True}
    assert_same_bits(
        compute(model, 4, kv_cache_dtype="mla_int8", **ranks), compute(model, 1, kv_cache_dtype="mla_int8")
    )


def engine(model: Path, ranks: int, tokens: int, kv_cache_dtype: str = "mla_int4", **options: Any) -> LLM:
    """An engine with memory on each rank for `tokens` tokens of one process."""
    return LLM(
        model,
        tokenizer="stories260k",
        max_num_seqs=4,
        block_size=16,
        threads=1,
        num_gpu_blocks_override=tokens // 16,
        tensor_parallel_size=ranks,
        decode_context_parallel_size=ranks,
        kv_cache_dtype=kv_cache_dtype,
        **options,
    )


def test_chunks_prefix_hits_and_preemption(tmp_path: Path) -> None:
    """Random prompts that share prefixes, in a cache that does not hold all of them, are those of an ample one."""
    model = saved("DeepseekV3", tmp_path)
    random = np.random.default_rng(1)
    start = random.integers(3, tiny_models.VOCAB, 70).tolist()
    prompts = [
        {"prompt_token_ids": start[: int(random.integers(1, 70))] + random.integers(3, tiny_models.VOCAB, 40).tolist()}
        for _ in range(12)
    ]
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, logprobs=2, ignore_eos=True)

    def answers(llm: LLM) -> list[Any]:
        outputs = [each.outputs[0] for each in llm.generate(prompts, params)]
        return [(each.token_ids, each.logprobs) for each in outputs]

    expected = answers(engine(model, 1, 4096, "bf16", max_num_batched_tokens=512))
    for ranks in (2, 4):
        llm = engine(model, ranks, 192, "bf16", max_num_batched_tokens=32, max_model_len=160)
        assert answers(llm) == expected
        stats = llm.stats()
        assert stats["preemptions"] > 0
        assert stats["cached_tokens"] > 0


def test_a_rank_holds_its_part(tmp_path: Path) -> None:
    """The cache of a rank holds as many more tokens as there are ranks, in figures and in fact."""
    model = saved("DeepseekV3", tmp_path, max_position_embeddings=4096)
    prompt = {"prompt_token_ids": np.random.default_rng(2).integers(3, tiny_models.VOCAB, 1600).tolist()}
    used = {}
    for ranks in (1, 2, 4):
        llm = engine(model, ranks, 4096, "bf16", max_model_len=2048)
        llm.generate([prompt], SamplingParams(max_tokens=1))
        stats = llm.stats()
        used[ranks] = stats["cache_used_bytes"], stats["bytes_per_token"]
    for ranks in (2, 4):
        assert used[ranks][0] <= 1.02 * used[1][0] / ranks
        assert used[ranks][1] == pytest.approx(used[1][1] / ranks)


def test_a_context_that_one_rank_would_not_hold(tmp_path: Path) -> None:
    model = saved("DeepseekV3", tmp_path, max_position_embeddings=4096)
    plain = LLM(model, tokenizer="stories260k", threads=1, kv_cache_dtype="mla_int8", kv_cache_memory_bytes=1 << 17)
    divided = LLM(
        model,
        tokenizer="stories260k",
        threads=1,
        kv_cache_dtype="mla_int8",
        kv_cache_memory_bytes=1 << 17,
        tensor_parallel_size=4,
        decode_context_parallel_size=4,
    )
    assert plain.config.max_model_len < 1100
    assert divided.config.max_model_len > 3 * plain.config.max_model_len
    count = divided.config.max_model_len - 1
    prompt = {"prompt_token_ids": np.random.default_rng(2).integers(3, tiny_models.VOCAB, count).tolist()}
    (output,) = divided.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 1


def test_entries_that_one_rank_would_not_hold(tmp_path: Path) -> None:
    """Windows and inputs of the next entries are whole on every rank, entries and keys divided."""
    rates = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 2}
    model = saved("DeepseekV4", tmp_path, max_position_embeddings=16384, compress_rates=rates)
    length = {}
    for ranks in (1, 2, 4):
        llm = LLM(
            model,
            tokenizer="stories260k",
            threads=1,
            block_size=32,
            kv_cache_memory_bytes=3 << 17,
            tensor_parallel_size=ranks,
            decode_context_parallel_size=ranks,
        )
        length[ranks] = llm.config.max_model_len
        prompt = {"prompt_token_ids": np.random.default_rng(2).integers(3, 90, length[ranks] - 1).tolist()}
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 1
    assert length[2] > 1.9 * length[1]
    assert length[4] > 3.8 * length[1]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("DeepseekV3", {"tensor_parallel_size": 1}, "= 2: must be 1 or tensor_parallel_size, 1"),
    ("DeepseekV3", {"tensor_parallel_size": 4}, "= 2: must be 1 or tensor_parallel_size, 4"),
    (
        "DeepseekV3",
        {"tensor_parallel_size": 8, "decode_context_parallel_size": 8},
        "= 8: pages are divided among 1, 2 or 4 ranks",
    ),
    ("DeepseekV3", {"decode_context_parallel_size": 0}, "= 0: must be between 1 and 16"),
    ("DeepseekV3", {"decode_context_parallel_size": 17}, "= 17: must be between 1 and 16"),
    (
        "DeepseekV3",
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
        "= 2: must be 1 or tensor_parallel_size, 1",
    ),
    ("DeepseekV32", {}, "= 2: DeepseekV32ForCausalLM has sparse attention"),
    ("Llama", {}, "= 2: LlamaForCausalLM has no latents"),
    ("DeepseekV3", {"kv_cache_dtype": "0=int8,128=int4"}, "= 2: not supported with a precision that depends on age"),
]


@pytest.mark.parametrize(("architecture", "options", "reason"), REFUSED)
def test_what_is_not_divided_is_refused(
    architecture: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = saved(architecture, tmp_path)
    ranks = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, **options}
    with pytest.raises(InputError, match=f"decode_context_parallel_size {reason}"):
        LLM(model, tokenizer="stories260k", **ranks)


def test_tiers_are_refused(tmp_path: Path) -> None:
    model = saved("DeepseekV3", tmp_path / "model")
    with pytest.raises(InputError, match="not supported with kv_cache_dir, whose files hold whole pages"):
        engine(model, 2, 256, kv_cache_dir=str(tmp_path / "pages"))
