"""SamplingParams: every value out of range is one error that names the field."""

from typing import Any

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
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
    ],
)
def test_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        SamplingParams(**{field: value})


def test_min_above_max() -> None:
    with pytest.raises(InputError, match="min_tokens is 20, more than max_tokens, 16"):
        SamplingParams(min_tokens=20)


def test_defaults_are_valid() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.n) == (16, 1.0, 1)
    assert SamplingParams(stop="x").stop_strings == ["x"]
    assert SamplingParams(top_k=-1, max_tokens=None).stop_strings == []
