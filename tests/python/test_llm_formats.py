"""Cache formats of LLM on the shipped model: their bytes, and what they change in the logits."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from stories import PROMPT

from kvanta import LLM, SamplingParams
from kvanta.fleet.plan import plan

# Root mean square of what a format changes in the logits of a story, as a share of their standard deviation: no two are
# alike, so that one that was taken for another shows. They were measured.
ERRORS = {
    "fp16": 0.0004,
    "bf16": 0.0033,
    "int8": 0.0119,
    "k=int8,v=bf16": 0.0120,
    "turboquant_k8v4": 0.0251,
    "fp8_per_token_head": 0.0383,
    "fp8_e4m3": 0.055,
    "int4_per_token_head": 0.063,
    "turboquant_4bit_nc": 0.090,
    "fp8_e5m2": 0.117,
    "t4": 0.123,
}


@pytest.mark.filterwarnings("ignore:kv_cache_dtype = .turboquant", "ignore:no KV scales were given")
def test_formats_that_do_not_pad_heads_of_8() -> None:
    rows = {row["name"]: row for row in plan("stories260k", 1 << 30)["formats"]}
    assert ERRORS.keys() - {"k=int8,v=bf16"} <= rows.keys()
    logits: dict[str, Any] = {}
    tokens: list[int] = []
    for name in ("fp32", *ERRORS):
        needs_scales = name in ("fp8_e4m3", "fp8_e5m2")
        with pytest.warns(UserWarning, match="scale") if needs_scales else contextlib.nullcontext():
            llm = LLM("stories260k", kv_cache_dtype=name, kv_cache_memory_bytes="8MiB", threads=1, block_size=16)
        if name == "fp32":
            (output,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True))
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        logits[name] = llm.logits(tokens)
        if name in rows:
            assert llm.stats()["bytes_per_token"] == rows[name]["bytes_per_token"]
    exact = logits.pop("fp32")
    found = {name: float(np.sqrt(np.mean((each - exact) ** 2)) / exact.std()) for name, each in logits.items()}
    assert found == pytest.approx(ERRORS, rel=0.2)
    assert len({each.tobytes() for each in logits.values()}) == len(ERRORS)
