"""Workloads, prompts, summaries: the parts of the load generator that need no server."""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvanta.errors import InputError
from kvanta.loadgen.goodput import AloneLatencies, Goodput, Target, lengths_alone, parse_targets
from kvanta.loadgen.prompts import WORDS, PromptMaker
from kvanta.loadgen.records import ERROR_KINDS, LoadError, RequestRecord
from kvanta.loadgen.report import read_report, text_of
from kvanta.loadgen.server_metrics import parse_metrics
from kvanta.loadgen.sse import EventReader
from kvanta.loadgen.summary import peak_concurrency, summarize
from kvanta.loadgen.workload import PlannedRequest, Workload, arrival_times, synthetic


def of_lengths(**changed: Any) -> Workload:
    given: dict[str, Any] = {"requests": 50, "rate": 4.0, "burstiness": 1.0, "input_tokens": 100, "output_tokens": 20}
    return synthetic(**{**given, **changed})


def test_synthetic_lengths_are_exact_or_within_their_spread() -> None:
    assert {(each.input_tokens, each.output_tokens) for each in of_lengths().requests} == {(100, 20)}
    wide = of_lengths(spread=0.5, requests=500, shared_prefix=7).requests
    inputs = [each.input_tokens for each in wide]
    assert (min(inputs), max(inputs)) == (57, 157)
    assert {min(each.output_tokens for each in wide), max(each.output_tokens for each in wide)} == {10, 30}
    assert [each.index for each in wide] == list(range(500))


def test_the_same_seed_is_the_same_workload() -> None:
    assert of_lengths(spread=0.3, seed=5) == of_lengths(spread=0.3, seed=5)
    assert of_lengths(spread=0.3, seed=5).requests != of_lengths(spread=0.3, seed=6).requests


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float, variation: float) -> None:
    times = arrival_times(20_000, 8.0, burstiness, np.random.default_rng(1))
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)  # 20,000 gaps: a standard error of at most 1.5 %
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.08)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert {each.arrival_s for each in of_lengths(rate=math.inf).requests} == {0.0}
    assert of_lengths(rate=math.inf).mean_rate == math.inf


def test_a_workload_is_stretched_to_a_rate() -> None:
    slow = of_lengths().at_rate(2.0)
    assert slow.mean_rate == pytest.approx(2.0)
    assert of_lengths().at_rate(math.inf).requests[-1].arrival_s == 0
    with pytest.raises(InputError, match="one moment"):
        of_lengths(rate=math.inf).at_rate(2.0)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"requests": 0}, "requests: 0"),
        ({"rate": 0.0}, "rate must .* got 0"),
        ({"rate": -1.0}, "rate must .* got -1"),
        ({"rate": math.nan}, "rate must .* got nan"),
        ({"burstiness": 0.0}, "burstiness must .* got 0"),
        ({"seed": -1}, "seed: -1"),
        ({"input_tokens": 0}, "input tokens: 0"),
        ({"output_tokens": 10**9}, "output tokens: 1000000000"),
        ({"spread": 1.5}, "spread: 1.5"),
        ({"shared_prefix": -1}, "shared prefix: -1"),
    ],
)
def test_bad_workloads_are_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        of_lengths(**changed)


def request(index: int, tokens: int, blocks: tuple[int, ...] = (), block_tokens: int = 0) -> PlannedRequest:
    return PlannedRequest(index, 0.0, tokens, 1, blocks, block_tokens)


def test_prompts_have_their_length_and_share_what_they_should() -> None:
    maker = PromptMaker(range(100, 200), seed=3)
    one, other = (maker.pieces(request(index, 30, (8, 9), 10)) for index in (0, 1))
    assert len(one) == len(other) == 30
    assert one[:20] == other[:20]
    assert one[20:] != other[20:]
    assert set(one) <= set(range(100, 200))
    third = maker.pieces(request(2, 25, (8, 7, 9), 10))
    assert third[:10] == one[:10]
    assert third[10:20] != one[10:20]
    assert third[20:] == one[10:15]  # a block's tokens are its own wherever it stands
    assert maker.pieces(request(0, 30, (8, 9), 10)) == one


def test_runs_and_seeds_share_no_prompt() -> None:
    asked = request(0, 30, (1,), 10)
    first = PromptMaker(range(1000), seed=3).pieces(asked, run=0)
    for other in (
        PromptMaker(range(1000), seed=3).pieces(asked, run=1),
        PromptMaker(range(1000), seed=4).pieces(asked),
    ):
        assert first[:10] != other[:10]
        assert first[10:] != other[10:]


def test_words_are_many_and_different() -> None:
    assert len(set(WORDS)) == len(WORDS) > 100


def record(index: int, **changed: Any) -> RequestRecord:
    """Sent at 1 s, tokens at 1.5, 1.6 and 2.0 s."""
    made = RequestRecord(index, 0.5, input_tokens=10, wanted_tokens=3, ready_s=0.5, sent_s=1.0, output_tokens=3)
    made.news_s, made.done_s = [1.5, 1.6, 2.0], 2.1
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def test_figures_of_a_run() -> None:
    lone = record(1, news_s=[3.0], output_tokens=1, done_s=3.0, cached_tokens=6)
    lost = record(2, news_s=[], done_s=1.25, error=LoadError("http_429", "too\nmany"))
    silent = record(3, news_s=[], done_s=1.5)
    report = summarize([record(0), lone, lost, silent], 4.0, Goodput(parse_targets(["ttft:600", "tpot:300"])))
    assert [report[name] for name in ("requests", "completed", "failed", "short_answers")] == [4, 2, 2, 1]
    assert [report[name] for name in ("input_tokens", "output_tokens", "cached_tokens")] == [20, 4, 6]
    assert (report["request_throughput"], report["output_throughput"], report["total_throughput"]) == (0.5, 1.0, 6.0)
    assert report["ttft_ms"] == pytest.approx(
        {"mean": 1250, "p50": 1250, "p90": 1850, "p95": 1925, "p99": 1985, "max": 2000}
    )
    assert report["tpot_ms"]["max"] == pytest.approx(250)  # the lone token has none
    assert report["itl_ms"]["max"] == pytest.approx(400)
    assert report["e2e_ms"]["p50"] == pytest.approx(1500)
    assert report["queue_ms"]["max"] == pytest.approx(500)
    assert report["generator_lag_ms"]["max"] == 0
    assert report["goodput"] == {
        "targets_ms": {"ttft": 600.0, "tpot": 300.0}, "requests": 1, "share": 0.25, "request_throughput": 0.25
    }  # fmt: skip
    assert report["errors"] == {
        "http_429": {"count": 1, "example": "too many"},
        "bad_response": {"count": 1, "example": "the answer has no token"},
    }
    assert report["peak_concurrency"] == 4
    json.dumps(report, allow_nan=False)


def test_every_key_and_kind_of_error_is_documented() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "bench-serve.md").read_text(encoding="utf-8")
    keys = [*summarize([record(0)], 1.0), *ERROR_KINDS]
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_a_run_without_answers_has_figures_too() -> None:
    report = summarize(
        [record(0, news_s=[], error=LoadError("connect", "no"))], 0.0, Goodput(parse_targets(["ttft:1"]))
    )
    assert report["ttft_ms"] is None
    assert report["goodput"]["share"] == 0
    json.dumps(report, allow_nan=False)


def test_one_request_after_the_other_is_a_concurrency_of_1() -> None:
    assert peak_concurrency([record(0), record(1, sent_s=2.1, done_s=3.0)]) == 1


def test_goodput_targets() -> None:
    targets = parse_targets(["ttft:500", "tpot:50", "e2el:1e4"])
    assert targets == {"ttft": Target(500.0), "tpot": Target(50.0), "e2e": Target(10000.0)}
    for text in ("ttft", "ttft:", "ttft:fast", "ttft:-1", "ttft:nan", "ttft:inf", "speed:1", ""):
        with pytest.raises(InputError, match="goodput target"):
            parse_targets([text])
    with pytest.raises(InputError, match="twice"):
        parse_targets(["e2e:1", "e2el:1"])
    assert parse_targets([], ["ttft=1,itl=0.2", "e2e=3x"]) == {
        "ttft": Target(1000.0), "itl": Target(200.0), "e2e": Target(3.0, is_multiple=True)
    }  # fmt: skip
    for text in ("ttft:1", "ttft=", "itl=x", "itl=0x", "ttft=1,", "speed=1"):
        with pytest.raises(InputError, match="SLO target"):
            parse_targets([], [text])
    with pytest.raises(InputError, match="goodput target"):
        parse_targets(["ttft:2x"])
    with pytest.raises(InputError, match="SLO target ttft is given twice"):
        parse_targets(["ttft:500"], ["ttft=1"])


def met(slo: str, *records: RequestRecord, alone: Sequence[AloneLatencies] = ()) -> list[int]:
    """Indices of the records that meet the targets."""
    goodput = Goodput(parse_targets([], [slo]), alone)
    return [each.index for each in records if goodput.figures([each], 1, 1.0)["requests"]]


def test_the_largest_gap_counts() -> None:
    even = record(0, news_s=[1.5, 1.75, 2.0])
    stalled = record(1, news_s=[1.5, 1.75, 2.0625])
    lone = record(2, news_s=[3.0], output_tokens=1)
    assert met("itl=0.26", even, stalled, lone) == [0, 2]
    assert met("itl=0.32,ttft=1", even, stalled, lone) == [0, 1]


def test_targets_are_multiples_of_a_request_alone_of_the_same_length() -> None:
    alone = [AloneLatencies(10, 100.0, 30.0, 50.0), AloneLatencies(30, 300.0, 40.0, 70.0)]
    half_a_second = [record(0, input_tokens=10), record(1, input_tokens=20), record(2, input_tokens=30)]
    assert met("ttft=2.4x", *half_a_second, alone=alone) == [1 + 1]  # 500 of 720 ms, of 480 and 240 ms
    assert met("ttft=2.6x", *half_a_second, alone=alone) == [1, 2]
    assert met("itl=6x", *half_a_second, alone=alone) == [2]  # 400 of 420 ms, of 360 and 300 ms
    assert met("e2e=6.2x", record(0), alone=alone) == []  # 1 s of 6.2 * (100 + 2 * 30) ms
    assert met("e2e=6.3x", record(0), alone=alone) == [0]
    assert Goodput(parse_targets([], ["ttft=5x,itl=1"]), alone).figures([record(0)], 2, 4.0) == {
        "targets_ms": {"itl": 1000.0}, "targets_times_alone": {"ttft": 5.0},
        "requests": 1, "share": 0.5, "request_throughput": 0.25,
    }  # fmt: skip


def test_lengths_that_are_measured_alone() -> None:
    assert lengths_alone([7, 3, 7]) == [3, 7]
    assert lengths_alone(range(1, 101)) == [1, 26, 51, 75, 100]
    figures = AloneLatencies.of(record(0, news_s=[1.5, 1.75, 2.75]))
    assert figures == AloneLatencies(10, 500.0, 625.0, 625.0)


@given(
    st.lists(st.text(alphabet="aä:{}\u2028 ", max_size=20), max_size=6),
    st.integers(1, 9),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_arrive_whole_however_they_are_cut(payloads: list[str], step: int, newline: str) -> None:
    sent = "".join(f": note{newline}event: x{newline}data: {each}{newline}{newline}" for each in payloads).encode()
    reader = EventReader()
    got = [data for begin in range(0, len(sent), step) for data in reader.feed(sent[begin : begin + step])]
    assert got == payloads


def test_events_of_several_lines_and_hostile_ones() -> None:
    assert EventReader().feed(b"data: a\ndata:b\n\ndata\n\nid: 3\n\n") == ["a\nb", ""]
    with pytest.raises(ValueError, match="more than 100 bytes"):
        EventReader(100).feed(b"data: " + b"x" * 200)
    reader = EventReader(100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        [reader.feed(b"data: xxxxxxxxxx\n") for _ in range(100)]
    with pytest.raises(ValueError, match="utf-8"):
        EventReader().feed(b"data: \xff\n\n")


def test_metrics_of_a_server() -> None:
    text = """\
# HELP kvanta:num_preemptions_total Preemptions.
kvanta:num_preemptions_total 3.0
kvanta:prefix_cache_hits_total{model_name="a \\" b}"} 100
kvanta:prefix_cache_hits_total{model_name="c"} 20
vllm:cache_config_info{block_size="64",cache_dtype="fp8"} 1.0
vllm:prefix_cache_hits_total{model_name="c"} 20
kvanta:damaged_total{a="b" nonsense
kvanta:num_preemptions_total NaN
python_gc_objects_collected_total 5
"""
    found = parse_metrics(text)
    assert (found.engine, found.cache_dtype) == ("kvanta", "fp8")
    assert found.counters == {"preemptions": 3.0, "prefix_hit_tokens": 120.0}
    assert found.since(parse_metrics("kvanta:num_preemptions_total 1")) == {"preemptions": 2, "prefix_hit_tokens": 120}
    assert parse_metrics("<html>\x00" * 1000).engine is None


def report_of(label: str, *runs: dict[str, Any]) -> dict[str, Any]:
    made = [{"rate": 1.0, "concurrency": None, **summarize([record(0)], 2.0), **run} for run in runs or ({},)]
    return {
        "url": "http://x", "model": "m", "label": label, "prompts": "ids", "exact_lengths": True,
        "workload": of_lengths().source, "runs": made,
    }  # fmt: skip


def test_reports_are_read_again_and_shown_next_to_each_other(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(report_of("int4")))
    text = text_of([read_report(str(file)), report_of("bf16", {"rate": None, "failed": 7})])
    rows = text.splitlines()
    assert [row.split()[0] for row in rows[4:6]] == ["int4", "bf16"]
    assert "all at once" in rows[5]
    assert len({len(row) for row in rows[2:6]}) <= 2  # aligned


NO_REPORTS: list[Any] = [
    [],
    {},
    {"runs": 3},
    {**report_of("a"), "runs": []},
    report_of("a", {"ttft_ms": 3}),
    report_of("a", {"output_throughput": "x"}),
]


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 100_000, *(json.dumps(each).encode() for each in NO_REPORTS)])
def test_files_that_are_no_report_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.json"):
        read_report(str(file))


def test_arrivals_ascend() -> None:
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(of_lengths().requests))
