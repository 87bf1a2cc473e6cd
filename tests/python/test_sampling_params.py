"""SamplingParams: every value out of range is one error that names the field."""

from typing import Any

import numpy as np
import pytest

from kvanta import InputError, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", -2),
        ("seed", 2**64),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 5),
        ("stop", b"a"),
        ("stop_token_ids", 5),
        ("stop_token_ids", "ab"),
        ("stop_token_ids", [-1]),
        ("logit_bias", [1]),
        ("logit_bias", {1: "x"}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {1: float("nan")}),
        ("ignore_eos", "false"),
        ("temperature", 10**400),
    ],
)
def test_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field) as caught:
        SamplingParams(**{field: value})
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy() -> None:
    numbers: dict[str, Any] = {"temperature": np.float32(0.5), "max_tokens": np.int64(3), "seed": np.uint64(2**64 - 1)}
    lists: dict[str, Any] = {"stop_token_ids": np.array([1, 2]), "logit_bias": {np.int32(1): np.float64(2)}}
    params = SamplingParams(**numbers, **lists, stop=(word for word in "ab"), ignore_eos=np.bool_(True))  # type: ignore[arg-type]
    assert (params.temperature, params.max_tokens, params.seed) == (0.5, 3, 2**64 - 1)
    assert type(params.temperature) is float
    assert type(params.max_tokens) is int
    assert (params.stop_token_ids, params.logit_bias, params.ignore_eos) == ([1, 2], {1: 2.0}, True)
    assert params.stop_strings == params.stop_strings == ["a", "b"]


def test_min_above_max() -> None:
    with pytest.raises(InputError, match="min_tokens must not exceed max_tokens, 16, got 20"):
        SamplingParams(min_tokens=20)


def test_defaults_are_valid() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.n) == (16, 1.0, 1)
    assert SamplingParams(stop="x").stop_strings == ["x"]
    assert SamplingParams(top_k=-1, max_tokens=None).stop_strings == []
