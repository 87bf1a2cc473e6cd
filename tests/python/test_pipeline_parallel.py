"""Pipeline parallelism: the bits of one process, with each rank's layers; steps in flight; ranks that are lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from divided_models import Computed, assert_same_bits, blocks, compute, gguf_file, quantized, saved
from serve_command import SMALL, serving

from kvanta import LLM, InputError, PoolingParams, SamplingParams

FOUR_LAYERS = {"num_hidden_layers": 4}
STATES: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
# Each: a checkpoint, options, and numbers of ranks.
CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any], tuple[int, ...]]] = {
    "Llama": (lambda folder: saved("Llama", folder, **FOUR_LAYERS), {"kv_cache_dtype": "int4+hadamard"}, (2, 3, 4)),
    "tied": (lambda folder: saved("Qwen3", folder, tie_word_embeddings=True), {"kv_cache_dtype": "int8"}, (3,)),
    "norms": (lambda folder: saved("Olmo2", folder), {}, (2,)),
    "windows": (lambda folder: saved("Gemma3", folder, **FOUR_LAYERS), {"kv_cache_dtype": "kivi2"}, (2,)),
    "edges": (lambda folder: saved("Llama", folder, num_hidden_layers=6), {"kv_cache_dtype": "t2"}, (2,)),
    "experts": (lambda folder: saved("GptOss", folder, **FOUR_LAYERS), {}, (2,)),
    "latents": (lambda folder: saved("DeepseekV3", folder), {}, (3,)),
    "recurrent": (
        lambda folder: saved("Qwen3_5", folder, **STATES),
        {},
        (2,),
    ),
    "Mamba-2": (
        lambda folder: saved("GraniteMoeHybrid", folder, layer_types=["linear_attention", "full_attention"] * 2),
        {},
        (2,),
    ),
    "side by side": (lambda folder: saved("FalconH1", folder), {}, (2,)),
    "rounded states": (
        lambda folder: saved("Qwen3_5", folder, **STATES),
        {"state_cache_dtype": "int8", "state_grid": 64},
        (2,),
    ),
    "learned positions": (lambda folder: saved("GPT2", folder), {}, (2,)),
    "GGUF": (lambda folder: blocks(folder, "Q4_K"), {"kv_cache_dtype": "int4"}, (2,)),
    "GGUF experts": (lambda folder: gguf_file(folder, "Qwen3Moe", "Q4_0"), {}, (2,)),
    "FP8": (lambda folder: quantized(folder, "ct_fp8_channel"), {"kv_cache_dtype": "nvfp4"}, (2,)),
    "drafts": (
        lambda folder: saved("Llama", folder),
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        (2,),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_give_the_bits_of_one_process(case: str, tmp_path: Path) -> None:
    make, options, sizes = CASES[case]
    model = make(tmp_path)
    expected: Computed = compute(model, 1, **options)
    for size in sizes:
        assert_same_bits(compute(model, size, pipeline_parallel_size=size, **options), expected)


@pytest.fixture(scope="module")
def piped() -> LLM:
    # A cache that holds few of the sequences at once, so that some are preempted while they are in flight.
    return LLM(
        "stories260k",
        threads=1,
        pipeline_parallel_size=2,
        block_size=16,
        kv_cache_memory_bytes=300_000,
        max_model_len=128,
        max_num_batched_tokens=64,
    )


def test_requests_of_all_kinds_share_a_pipeline(piped: LLM) -> None:
    alone = LLM("stories260k", threads=1, block_size=16, max_model_len=128)
    prompts = [f"Once upon a time there {word} a" for word in ("was", "were", "is", "will be", "had been", "came")] * 4
    params = [
        SamplingParams(
            max_tokens=20 + 3 * i, temperature=0.8, seed=i, logprobs=2, prompt_logprobs=1 if i % 5 == 0 else None
        )
        for i in range(len(prompts))
    ]
    found, expected = (llm.generate(prompts, params, use_tqdm=False) for llm in (piped, alone))
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
        assert one.prompt_logprobs == other.prompt_logprobs
    assert piped.stats()["preemptions"] > 0
    pooling = PoolingParams(pooling_type="MEAN")
    embedded = [
        [output.outputs.embedding for output in llm.embed(prompts, pooling_params=pooling)] for llm in (piped, alone)
    ]
    assert embedded[0] == embedded[1]


def test_a_request_may_end_while_a_step_has_it(piped: LLM) -> None:
    whole = piped.generate("Once upon a time", SamplingParams(max_tokens=60, temperature=0.0))[0].outputs[0].token_ids
    for taken in range(1, 6):
        streams = [piped.stream("Once upon a time", SamplingParams(max_tokens=60, temperature=0.0)) for _ in range(3)]
        for stream in streams:
            for _ in range(taken):
                next(stream)
        for stream in streams:
            stream.close()  # aborts
    assert (
        piped.generate("Once upon a time", SamplingParams(max_tokens=60, temperature=0.0))[0].outputs[0].token_ids
        == whole
    )
    assert piped.stats()["running"] == 0


def test_logits_between_steps_spare_those_in_flight(piped: LLM) -> None:
    params = [SamplingParams(max_tokens=40, temperature=0.8, seed=seed) for seed in range(3)]
    whole = [each.outputs[0].token_ids for each in piped.generate(["Once upon a time"] * 3, params, use_tqdm=False)]
    tokens = piped.tokenizer.encode("Lily and Tom went to the park and saw a big dog. " * 6)[:120]
    expected = piped.logits(tokens, chunk_tokens=16)
    streams = [piped.stream("Once upon a time", each) for each in params]
    outputs = [next(stream)[1].outputs[0] for stream in streams]
    found = piped.logits(tokens, chunk_tokens=16)  # more passes than steps fit into the pipeline
    for stream in streams:
        for _ in stream:
            pass
    assert [output.token_ids for output in outputs] == whole
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pipeline_parallel_size": 6}, "the 5 layers of LlamaForCausalLM do not divide among so many ranks"),
        ({"pipeline_parallel_size": 17}, "pipeline_parallel_size = 17: must be between 1 and 16"),
        (
            {"tensor_parallel_size": 2},
            "pipeline_parallel_size = 2: not supported together with tensor_parallel_size = 2",
        ),
        ({"kv_cache_dir": "pages"}, "pipeline_parallel_size = 2: not supported with kv_cache_dir"),
        ({"kv_store": "redis://127.0.0.1:1"}, "pipeline_parallel_size = 2: not supported with kv_store"),
        ({"device": "cuda"}, "pipeline_parallel_size = 2: not supported with device cuda"),
        ({"quality_sample_rate": 0.5}, "pipeline_parallel_size = 2: not supported with quality_sample_rate"),
        ({"distributed_timeout_seconds": 0}, "distributed_timeout_seconds = 0: must be at least 1"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        LLM("stories260k", **{"pipeline_parallel_size": 2, **options})


def test_every_rank_needs_all_kinds_of_layers(tmp_path: Path) -> None:
    layers = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    model = saved("Gemma3", tmp_path, num_hidden_layers=4, layer_types=layers)
    with pytest.raises(InputError, match="with all kinds of cache pages in each; 1 do"):
        LLM(model, tokenizer="stories260k", pipeline_parallel_size=2)


def test_each_rank_has_its_layers_weights_and_cache() -> None:
    whole = LLM("stories260k", threads=1, kv_cache_memory_bytes=1 << 22)
    part = LLM("stories260k", threads=1, kv_cache_memory_bytes=1 << 22, pipeline_parallel_size=2)
    assert part.stats()["weight_bytes"] < 0.6 * whole.stats()["weight_bytes"]
    page, whole_page = (llm.stats()["groups"][0]["page_bytes"] for llm in (part, whole))
    assert page == whole_page * 2 // 5
    # No rank's cache is larger than requested: rank 1 has three layers.
    assert part.stats()["cache_budget_bytes"] == (1 << 22) * 2 // 3


def test_a_server_ends_with_a_rank() -> None:
    log: list[str] = []
    with serving("stories260k", *SMALL, "-pp", "2", "--distributed-timeout-seconds", "2", log=log) as (process, client):
        body = {"prompt": "Once", "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGSTOP)
        assert client.post("/v1/completions", json=body).status_code == 500
        assert process.wait(120) == 1
    assert any("ERROR rank 1 of 2 is lost: it did not answer within 2 seconds" in line for line in log)
