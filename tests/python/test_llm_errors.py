"""LLM on what it cannot do: every bad call and option is one clear error, and the engine goes on."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from stories import GREEDY, PROMPT

import kvanta
from kvanta import LLM, InputError, KvantaError, ResourceError, SamplingParams


def test_a_format_that_the_layers_cannot_take() -> None:
    with pytest.raises(InputError, match=r"layer 0: mla_int4 stores the latents of MLA.*formats for them: .*int4"):
        LLM("stories260k", kv_cache_dtype="mla_int4", kv_cache_memory_bytes="8MiB")


def changed(**fields: Any) -> SamplingParams:
    params = SamplingParams()
    for name, value in fields.items():
        setattr(params, name, value)
    return params


BAD_CALLS: dict[str, tuple[Callable[[LLM], Any], str]] = {
    "an empty text": (lambda llm: llm.generate(""), r"the prompt is empty: give a text, or token ids such as \[1\]"),
    "an empty text of several": (lambda llm: llm.generate(["a", ""]), "the prompt is empty"),
    "an empty text in a mapping": (lambda llm: llm.generate({"prompt": ""}), "the prompt is empty"),
    "parameters that are a number": (lambda llm: llm.generate("a", 5), "sampling_params must .* got 5"),  # type: ignore[arg-type]
    "parameters that are a mapping": (
        lambda llm: llm.generate("a", {"max_tokens": 3}),  # type: ignore[arg-type]
        "sampling_params must .*SamplingParams.* got .*max_tokens",
    ),
    "parameters of a stream": (lambda llm: list(llm.stream("a", 5)), "sampling_params must .* got 5"),  # type: ignore[arg-type]
    "parameters that were changed": (lambda llm: llm.generate("a", changed(stop=5)), "stop must .* got 5"),
    "logits of a negative token": (lambda llm: llm.logits([-1]), r"-1 at position 0 is not in 0\.\.511"),
    "logits of two axes": (lambda llm: llm.logits(np.zeros((40, 3), np.int32)), "whole numbers"),
    "logits of a number": (lambda llm: llm.logits(5), "whole numbers"),  # type: ignore[arg-type]
    "logits far longer than the model": (lambda llm: llm.logits([1] * 10**6), "1000000 tokens.*512"),
    "a part of the cache": (
        lambda llm: llm.logits([1], use_prefix_cache="no"),  # type: ignore[arg-type]
        "use_prefix_cache must .* got 'no'",
    ),
    "no tokens": (lambda llm: llm.generate([{"prompt_token_ids": []}]), "empty"),
    "token beyond the vocabulary": (lambda llm: llm.generate([[1, 512]]), r"512 at position 1 is not in 0\.\.511"),
    "negative token": (lambda llm: llm.generate([[1, -1]]), r"-1 at position 1 is not in 0\.\.511"),
    "huge token": (lambda llm: llm.generate([[2**40]]), r"1099511627776 at position 0 is not in 0\.\.511"),
    "a picture": (
        lambda llm: llm.generate({"prompt": "a", "multi_modal_data": {"image": 1}}),
        "'multi_modal_data' of a prompt is not supported, got {'image': 1}; supported: prompt, .*, cache_salt",
    ),
    "a salt that is a number": (lambda llm: llm.generate({"prompt": "a", "cache_salt": 5}), "cache_salt must .* got 5"),
    "tokens that are text": (lambda llm: llm.generate([["a"]]), "whole numbers"),  # type: ignore[arg-type]
    "bytes": (lambda llm: llm.generate(b"abc"), "bytes"),
    "a number": (lambda llm: llm.generate(5), "int"),  # type: ignore[arg-type]
    "a mapping without a prompt": (lambda llm: llm.generate({"text": "x"}), "prompt_token_ids"),
    "longer than the model": (lambda llm: llm.generate([[1] * 600]), "512"),
    "lone surrogate": (lambda llm: llm.generate("\ud800"), "surrogate"),
    "parameters for another number of prompts": (lambda llm: llm.generate(["a", "b"], [GREEDY]), "1 .* 2 prompts"),
    "chat without a template": (lambda llm: llm.chat([{"role": "user", "content": "x"}]), "no chat template"),
    "several texts in a stream": (lambda llm: list(llm.stream("a", SamplingParams(n=2))), "n is 2"),
    "logits of nothing": (lambda llm: llm.logits([]), ""),
    "logits beyond the vocabulary": (lambda llm: llm.logits([512]), "512"),
    "logits longer than the model": (lambda llm: llm.logits([1] * 600), "512"),
    "chunks of nothing": (lambda llm: llm.logits([1], chunk_tokens=0), "chunk_tokens"),
    "a stop token beyond the vocabulary": (
        lambda llm: llm.generate("a", SamplingParams(stop_token_ids=[9999])),
        "9999",
    ),
    "key means that are a text": (
        lambda llm: llm.kv_statistics([1, 2], "x"),  # type: ignore[arg-type]
        "key_means is not an array of numbers",
    ),
    "key means of another model": (
        lambda llm: llm.kv_statistics([1, 2], np.zeros((5, 8, 4), np.float32)),
        r"key_means has shape \[5, 8, 4\]; expected \[5, 4, 8\]",
    ),
    "moments with a text for a flag": (
        lambda llm: llm.query_moments([1, 2], "yes"),  # type: ignore[arg-type]
        "weighted must be True or False, got 'yes'",
    ),
    "context lengths that are a number": (
        lambda llm: llm.query_moments([1, 2], context_lengths=3),  # type: ignore[arg-type]
        "context_lengths must be a list of whole numbers, got 3",
    ),
    "context lengths of halves": (
        lambda llm: llm.query_moments([1, 2], context_lengths=[1.5]),  # type: ignore[list-item]
        "an entry of context_lengths must be a whole number .* got 1.5",
    ),
    "a bias beyond the vocabulary": (lambda llm: llm.generate("a", SamplingParams(logit_bias={9999: 1.0})), "9999"),
}


@pytest.mark.parametrize(("call", "reason"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_calls(llm: LLM, story: list[int], call: Callable[[LLM], Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason or None) as caught:
        call(llm)
    assert "\n" not in str(caught.value)
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == story  # and the engine goes on


def test_one_bad_prompt_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(InputError):
        llm.generate([[1, 2, 3], [1, 2, 3], [512]], GREEDY)
    assert llm.stats()["running"] == llm.stats()["waiting"] == 0


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown format": ({"kv_cache_dtype": "int9"}, "int9.*int8"),
    "unknown option": ({"kv_cache_dtyp": "int8"}, "kv_cache_dtyp.*did you mean kv_cache_dtype"),
    "unknown dtype": ({"dtype": "int3"}, "^dtype must be one of .*bfloat16.* got 'int3'"),
    "unknown weights": ({"weight_dtype": "int3"}, "weight_dtype must be one of auto, bf16, int8, int4, got 'int3'"),
    "no such device": ({"device": "tpu"}, "device .*cpu.*tpu"),
    "no such isa": ({"isa": "sse"}, "sse"),
    "odd pages": ({"block_size": 48}, "48.*64"),
    "pages twice": ({"block_size": 32, "page_size": 16}, "twice"),
    "longer than the model": ({"max_model_len": 513}, "513.*512"),
    "negative length": ({"max_model_len": -5}, "-5"),
    "no sequences": ({"max_num_seqs": -1}, "-1"),
    "too many threads": ({"threads": 10**6}, "1000000"),
    "negative seed": ({"seed": -1}, "seed"),
    "huge page": ({"block_size": 2**40}, "1099511627776"),
    "a layer that is not there": ({"kv_cache_dtype_layers": "5=bf16"}, "5"),
    "a scale file that is not there": (
        {"kv_cache_dtype": "fp8", "quantization_param_path": "/nowhere.json"},
        "nowhere",
    ),
    "a text for a flag": (
        {"enable_prefix_caching": "false"},
        "enable_prefix_caching must be True or False, got 'false'",
    ),
    "a number for a flag": ({"calculate_kv_scales": 1}, "calculate_kv_scales must be True or False, got 1"),
    "a text for the opposite": (
        {"disable_radix_cache": "false"},
        "disable_radix_cache must be True or False, got 'false'",
    ),
    "a number for a list": ({"kv_cache_dtype_skip_layers": 1.5}, "kv_cache_dtype_skip_layers must be LAYER, got 1.5"),
    "a text that is not UTF-8": ({"kv_cache_dtype": "\ud800"}, "kv_cache_dtype.*UTF-8"),
    "a tokenizer that is a number": ({"tokenizer": 5}, "MODEL is 5"),
    "a size that is a word": ({"kv_cache_memory_bytes": "much"}, "much"),
}


@pytest.mark.parametrize(("options", "reason"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_options(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        LLM("stories260k", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", [None, 5, b"stories260k", "", "\udcff"])
def test_models_that_are_none(model: Any) -> None:
    with pytest.raises(InputError, match=r"MODEL is|not a path") as caught:
        LLM(model)
    assert "\n" not in str(caught.value)


def test_memory_that_does_not_suffice() -> None:
    with pytest.raises((ResourceError, InputError), match=r"bytes|memory"):
        LLM("stories260k", kv_cache_memory_bytes=1000)
    with pytest.raises(ResourceError):
        LLM("stories260k", kv_cache_memory_bytes="1000TiB")


PUBLIC_ERRORS = [
    error
    for name in kvanta.__all__
    if isinstance(error := getattr(kvanta, name), type) and issubclass(error, Exception) and error is not KvantaError
]


def test_public_errors_have_one_base() -> None:
    names = {error.__name__ for error in PUBLIC_ERRORS}
    assert names == {"InputError", "QueueFullError", "RankLostError", "ResourceError"}
    for error in PUBLIC_ERRORS:
        assert issubclass(error, KvantaError)
        assert issubclass(error, ValueError), "programs that catch ValueError go on to work"
        copy = pickle.loads(pickle.dumps(error("a reason")))  # as processes exchange them
        assert type(copy) is error
        assert str(copy) == "a reason"


def test_errors_of_python_and_of_the_library_have_that_base() -> None:
    with pytest.raises(KvantaError, match="int99"):
        kvanta.formats.encode("int99", "k", [[0.0] * 32])
    with pytest.raises(KvantaError, match="max_tokens"):
        SamplingParams(max_tokens=-1)
