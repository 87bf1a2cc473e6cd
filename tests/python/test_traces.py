"""Serving traces in each format, whole and damaged."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvanta.errors import InputError
from kvanta.loadgen.traces import read_trace
from kvanta.loadgen.workload import Workload

# The first rows of the published files.
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.017335+00:00,2399,6
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 700, "output_length": 490, "hash_ids": [0, 3]}
{"timestamp": 27482, "input_length": 513, "output_length": 1, "hash_ids": [0, 4]}
"""

BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
BURSTGPT_2 = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
10.0,,3.5,GPT-4,47,9,56,API log
"""
LENGTHS = """\
{"input_length": 24, "output_length": 150}
{"input_length": 700, "output_length": 20}
{"input_length": 9, "output_length": 400}
"""


def read(folder: Path, content: str | bytes, **options: Any) -> Workload:
    file = folder / "trace"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_trace(file, **options)


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(each.input_tokens, each.output_tokens) for each in workload.requests]


@pytest.mark.parametrize(
    "change", [lambda text: text, lambda text: text.replace("\n", "\r\n"), lambda text: "\ufeff" + text]
)
def test_azure(tmp_path: Path, change: Any) -> None:
    trace = read(tmp_path, change(AZURE))
    assert trace.source["kind"] == "azure"
    assert lengths(trace) == [(374, 44), (396, 109), (879, 55)]
    assert [each.arrival_s for each in trace.requests] == pytest.approx([0, 4.314579, 4.541877], abs=1e-5)
    assert [each.blocks for each in trace.requests] == [(), (), ()]


def test_azure_of_2024_and_in_any_order(tmp_path: Path) -> None:
    assert lengths(read(tmp_path, AZURE_2024)) == [(2162, 5), (2399, 6)]
    header, first, second, third = AZURE.splitlines()
    mixed = read(tmp_path, "\n".join([header, third, "", first, second]))
    assert mixed == read(tmp_path, AZURE)


def test_burstgpt(tmp_path: Path) -> None:
    trace = read(tmp_path, BURSTGPT)
    assert trace.source["kind"] == "burstgpt"
    assert lengths(trace) == [(472, 18), (417, 276)]  # without the request that failed
    assert [each.arrival_s for each in trace.requests] == [0, 113]
    assert lengths(read(tmp_path, BURSTGPT_2)) == [(47, 9)]


def test_the_first_requests_of_a_file_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvanta.loadgen.traces.MAX_REQUESTS", 2)
    with pytest.raises(InputError, match="more than 2 requests"):
        read(tmp_path, AZURE)
    header, *rows = AZURE.splitlines()
    for mixed in (rows, rows[::-1]):
        assert lengths(read(tmp_path, "\n".join([header, *mixed]), requests=2)) == [(374, 44), (396, 109)]


def test_lengths_without_times_take_drawn_ones(tmp_path: Path) -> None:
    trace = read(tmp_path, LENGTHS)
    assert trace.source["kind"] == "lengths"
    assert lengths(trace) == [(24, 150), (700, 20), (9, 400)]
    assert trace.mean_rate == float("inf")
    drawn = trace.arriving(2.0, 1.0, 7)
    assert lengths(drawn) == lengths(trace)
    times = [each.arrival_s for each in drawn.requests]
    assert times[0] == 0 < times[1] < times[2]
    assert drawn == trace.arriving(2.0, 1.0, 7) != trace.arriving(2.0, 1.0, 8)
    assert drawn.source["seed"] == 7
    with pytest.raises(InputError, match="rate must be above 0"):
        trace.arriving(0.0, 1.0, 7)


def test_mooncake(tmp_path: Path) -> None:
    trace = read(tmp_path, MOONCAKE)
    assert trace.source["kind"] == "mooncake"
    assert lengths(trace) == [(1100, 500), (700, 490), (513, 1)]
    assert [each.arrival_s for each in trace.requests] == [0, 3, 27.482]
    assert [each.blocks for each in trace.requests] == [(0, 1, 2), (0, 3), (0, 4)]
    assert {each.block_tokens for each in trace.requests} == {512}


def test_lengths_are_scaled_and_cut_and_blocks_with_them(tmp_path: Path) -> None:
    trace = read(tmp_path, MOONCAKE, length_scale=0.25, max_input=200, max_output=100)
    assert lengths(trace) == [(200, 100), (175, 100), (128, 1)]
    assert {each.block_tokens for each in trace.requests} == {128}
    assert lengths(read(tmp_path, MOONCAKE, length_scale=0.001))[2] == (1, 1)


def test_only_so_many_requests(tmp_path: Path) -> None:
    assert lengths(read(tmp_path, AZURE, requests=2)) == [(374, 44), (396, 109)]
    assert len(read(tmp_path, AZURE, requests=99).requests) == 3


def test_a_request_of_no_tokens_is_one_of_one(tmp_path: Path) -> None:
    assert lengths(read(tmp_path, AZURE.replace("374,44", "0,0")))[0] == (1, 1)


def line(**changed: Any) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1], **changed})


BAD = {
    "empty": ("", "neither"),
    "only a header": (AZURE.splitlines()[0], "no requests"),
    "something else": ("hello, world\n", "neither Azure's header"),
    "not UTF-8": (b"TIMESTAMP\xff", "not UTF-8"),
    "zero bytes": (b"\0" * 100, "neither"),
    "a column missing": ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1\n", "1: no column GeneratedTokens"),
    "a cell missing": (AZURE + "2023-11-16 18:15:52,7\n", "5: 2 columns"),
    "a cell too many": (AZURE + "2023-11-16 18:15:52,7,8,9\n", "5: 4 columns"),
    "an open quote": (AZURE + '2023-11-16 18:15:52,"7,8\n', "5: "),
    "no time": (AZURE + "yesterday,7,8\n", "5: TIMESTAMP must .*got 'yesterday'"),
    "a negative length": (AZURE + "2023-11-16 18:15:52,-7,8\n", "5: ContextTokens must .*got '-7'"),
    "a length with a fraction": (AZURE + "2023-11-16 18:15:52,7,8.5\n", "5: GeneratedTokens must .*got '8.5'"),
    "a foreign digit": (AZURE + "2023-11-16 18:15:52,٣,8\n", "5: ContextTokens"),
    "a length of many digits": (AZURE + f"2023-11-16 18:15:52,{'9' * 5000},8\n", "5: ContextTokens must .*got '999"),
    "times with and without a zone": (
        AZURE + "2023-11-16 18:15:52+00:00,7,8\n",
        "5: a time with a zone and, in line 2",
    ),
    "an endless line": (AZURE + "2" * (1 << 20), "5: a line of more than"),
    "half an object": (MOONCAKE + '{"timestamp": 1', "4: .* is not a JSON object"),
    "not an object": (MOONCAKE + "[1]", r"4: \[1\] is not a JSON object"),
    "deeply nested": (MOONCAKE + "[" * 200_000, "4: .* is not a JSON object"),
    "no timestamp": ('{"input_length": 1, "output_length": 1, "hash_ids": []}', "1: no 'timestamp'"),
    "a second time missing": (MOONCAKE + '{"input_length": 1, "output_length": 1}', "4: no 'timestamp'"),
    "an answer missing": ('{"input_length": 1}', "1: no 'output_length'"),
    "an odd time": (BURSTGPT + "noon,x,1,1,2,y\n", "5: Timestamp must be seconds from 0 on, got 'noon'"),
    "BurstGPT's column missing": ("Timestamp,Model,Request tokens\n", "1: no column Response tokens"),
    "a time that is not a number": (line(timestamp=float("nan")), "1: timestamp must .* got nan"),
    "a time before the start": (line(timestamp=-1), "1: timestamp must .* got -1"),
    "a length that is a word": (line(input_length="many"), "1: input_length must .*got 'many'"),
    "a length that is true": (line(output_length=True), "1: output_length must .* got True"),
    "an enormous length": (line(output_length=10**8), "1: output_length must .*got 100000000"),
    "ids that are an object": (line(hash_ids={"a": 1}), "1: hash_ids must"),
    "a negative id": (line(hash_ids=[-1]), "1: hash_ids must"),
    "an id without end": (line(hash_ids=[10**40]), "1: hash_ids must"),
    "more ids than blocks": (line(hash_ids=[1, 2, 3]), "1: 3 hash_ids for 600 tokens"),
}


@pytest.mark.parametrize(("content", "reason"), BAD.values(), ids=BAD.keys())
def test_damaged_traces_are_refused_with_the_line(content: str | bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=reason) as refused:
        read(tmp_path, content)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400 + len(str(tmp_path))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([AZURE, MOONCAKE]), st.integers(0, 200), st.binary(min_size=1, max_size=4))
def test_any_damage_is_an_error_of_one_kind_or_still_a_trace(
    tmp_path: Path, content: str, at: int, bytes_: bytes
) -> None:
    data = content.encode()
    at %= len(data)
    try:
        trace = read(tmp_path, data[:at] + bytes_ + data[at + len(bytes_) :])
    except InputError:
        return
    assert all(each.arrival_s >= 0 and each.input_tokens > 0 for each in trace.requests)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"trace_format": "burst"}, "no trace format 'burst'"),
        ({"trace_format": "mooncake"}, "1: .* is not a JSON object"),
        ({"length_scale": 0.0}, "length scale must be above 0, got 0"),
        ({"max_input": 0}, "most inputs are 0"),
        ({"requests": -1}, "most requests are -1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=reason):
        read(tmp_path, AZURE, **options)


def test_no_such_file() -> None:
    for name in ("/no/such/trace", "/", "a\0b"):
        with pytest.raises(InputError, match="cannot read the trace"):
            read_trace(name)
