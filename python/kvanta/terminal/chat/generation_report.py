"""Figures of one generated text: speed, and the cache that it took."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvanta.llm import LLM
from kvanta.outputs import RequestOutput
from kvanta.terminal.tables import human_bytes


class GenerationMeter:
    """Measures one text of `LLM.stream`: times, and the most bytes that the engine held for it, whose pages are freed
    with its last token.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._page = -1
        self._cache_bytes = self._exact_bytes = 0
        self._begin = self._first = self._end = time.perf_counter()

    def update(self, output: RequestOutput) -> None:
        """After every step. Asks the engine once per page: what it holds grows by pages."""
        new_tokens = len(output.outputs[0].token_ids)
        self._end = time.perf_counter()
        if new_tokens <= 1:
            self._first = self._end
        tokens = len(output.prompt_token_ids) + new_tokens - 1  # the newest is not in the cache
        page = (tokens - 1) // self._llm.config.page_size
        if page != self._page and not output.finished:
            self._page = page
            stats = self._llm.stats()
            if stats["cache_used_bytes"] > self._cache_bytes:
                self._cache_bytes = int(stats["cache_used_bytes"])
                self._exact_bytes = sum(each["exact_pages_used"] * each["exact_page_bytes"] for each in stats["groups"])

    def report(self, output: RequestOutput) -> dict[str, Any]:
        """The figures, as `kvanta generate --json` writes them."""
        stats = self._llm.stats()
        text = output.outputs[0]
        scales = [scale for layer in stats["layers"] for side in ("k_scale", "v_scale") for scale in layer[side]]
        seconds = self._end - self._first
        return {
            "model": self._llm.model,
            "prompt_tokens": len(output.prompt_token_ids),
            "generated_tokens": len(text.token_ids),
            "text": text.text,
            "token_ids": text.token_ids,
            "finish_reason": text.finish_reason,
            "draft_tokens": text.num_draft_tokens,
            "accepted_tokens": text.num_accepted_tokens,
            "seconds_to_first_token": self._first - self._begin,
            "tokens_per_second": (len(text.token_ids) - 1) / seconds if seconds > 0 else 0.0,
            "kv_cache_dtype": stats["kv_cache_dtype"],
            "bytes_per_token": stats["bytes_per_token"],
            "cache_bytes": self._cache_bytes or None,
            "exact_bytes": self._exact_bytes,
            "saturated": stats["saturated"],
            "unit_scales": bool(scales) and all(scale == 1.0 for scale in scales),
            "backend": stats["backend"],
            "ranks": max(self._llm.config.tensor_parallel_size, self._llm.config.pipeline_parallel_size),
        }


def closing_line(report: Mapping[str, Any]) -> str:
    """The figures in one line, and a second one about clipped values."""
    held = "" if report["cache_bytes"] is None else f", {human_bytes(report['cache_bytes'])} held"
    if report["exact_bytes"]:
        held += f", of it {human_bytes(report['exact_bytes'])} exact pages"
    drafted = report["draft_tokens"]
    drafts = f", {report['accepted_tokens']} of {drafted} draft tokens accepted" if drafted else ""
    where = f" on rank 0 of {report['ranks']}" if report["ranks"] > 1 else ""  # its own part of the cache
    line = (
        f"[{report['generated_tokens']} tokens, {report['tokens_per_second']:.1f} tokens/s, "
        f"first after {report['seconds_to_first_token']:.2f} s{drafts} | {report['kv_cache_dtype']} cache: "
        f"{report['bytes_per_token']:,.0f} bytes/token{held}{where}]"
    )
    if report["saturated"]:
        line += f"\n[{report['saturated']} values did not fit the cache format and were clipped"
        line += ": it needs scales]" if report["unit_scales"] else "]"
    return line
