"""The figures of a run: percentiles of latencies, throughput, goodput, errors by kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvanta.loadgen.goodput import Goodput
from kvanta.loadgen.records import RequestRecord

PERCENTILES = (50, 90, 95, 99)


def summarize(records: Sequence[RequestRecord], duration_s: float, goodput: Goodput | None = None) -> dict[str, Any]:
    """See docs/bench-serve.md for the keys. Latencies are those of requests that have succeeded."""
    good = [record for record in records if record.succeeded]
    seconds = max(duration_s, 1e-9)
    inputs, outputs = (sum(getattr(each, name) for each in good) for name in ("input_tokens", "output_tokens"))
    return {
        "requests": len(records),
        "completed": len(good),
        "failed": len(records) - len(good),
        "duration_s": duration_s,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "cached_tokens": sum(each.cached_tokens for each in good),
        "short_answers": sum(each.output_tokens < each.wanted_tokens for each in good),
        "request_throughput": len(good) / seconds,
        "output_throughput": outputs / seconds,
        "total_throughput": (inputs + outputs) / seconds,
        "peak_concurrency": peak_concurrency(records),
        "ttft_ms": distribution([each.ttft_s for each in good]),
        "tpot_ms": distribution([each.tpot_s for each in good if each.tpot_s is not None]),
        "itl_ms": distribution([gap for each in good for gap in each.gaps_s]),
        "e2e_ms": distribution([each.e2e_s for each in good]),
        "queue_ms": distribution([each.sent_s - each.ready_s for each in good]),
        "generator_lag_ms": distribution([each.ready_s - each.due_s for each in records]),
        "goodput": goodput.figures(good, len(records), seconds) if goodput else None,
        "errors": _errors(records),
    }


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """The most requests that were on their way at one time."""
    ends = [(record.done_s, -1) for record in records if record.done_s is not None]
    changes = sorted([*ends, *((record.sent_s, 1) for record in records if record.done_s is not None)])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum in milliseconds; None where there is nothing."""
    if not seconds:
        return None
    values = 1000 * np.asarray(seconds, dtype=np.float64)
    points = np.percentile(values, PERCENTILES)
    named = {f"p{point}": float(value) for point, value in zip(PERCENTILES, points, strict=True)}
    return {"mean": float(values.mean()), **named, "max": float(values.max())}


def _errors(records: Sequence[RequestRecord]) -> dict[str, dict[str, Any]]:
    """Errors by kind, the most frequent first: their number and the first message."""
    kinds: dict[str, dict[str, Any]] = {}
    for record in records:
        if not record.succeeded:
            kind = record.error.kind if record.error else "bad_response"
            detail = record.error.detail if record.error else "the answer has no token"
            kinds.setdefault(kind, {"count": 0, "example": detail})["count"] += 1
    return dict(sorted(kinds.items(), key=lambda item: -item[1]["count"]))
