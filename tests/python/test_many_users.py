"""benchmarks/many_users.py: its figures from known times, and its scenes on a small server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import many_users
import pytest
from live_server import live_server
from many_users_scenes import median_figures, stall_figures
from tiny_checkpoints import write_checkpoint

CONTEXT = 1 << 21
"""Tokens: no stream of the test ends by itself, however late the prompt next to it is computed."""

SMALL = [
    *(
        "--prompt",
        "200",
        "--streams",
        "2",
        "--stream-prompt",
        "8",
        "--stream-tokens",
        str(CONTEXT - 8),
        "--before",
        "5",
    ),
    *("--delay-s", "0", "--per-minute", "6000", "--minutes", "1", "--waiting", "6", "--waiting-prompt", "30"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A window, so that the cache of a stream does not grow."""
    changes: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    folder = tmp_path_factory.mktemp("endless")
    # Few layers and channels: a table has their rotations for all positions.
    return str(write_checkpoint(folder, max_position_embeddings=CONTEXT, num_hidden_layers=1, head_dim=8, **changes))


def test_gaps_belong_to_the_prompt_while_it_is_computed() -> None:
    even = [0.0, 0.1, 0.2, 0.3, 0.3, 0.4, 0.5, 0.6, 0.7]
    stalled = [0.0, 0.1, 0.2, 0.55, 0.65, 1.65]  # the last gap begins after the prompt's first token
    figures = stall_figures([even, stalled], sent=0.25, first=0.6, alone_s=0.2, prompt_tokens=100)
    assert figures["median_before_ms"] == pytest.approx(100)
    assert figures["largest_ms"] == pytest.approx(350)
    assert figures["largest_times_median"] == pytest.approx(3.5)
    assert figures["times_alone"] == pytest.approx(1.75)
    assert figures["stream_tokens"] == 6
    assert figures["tokens_per_s"] == pytest.approx(106 / 0.35)
    assert figures["times_alone_without_streams"] == pytest.approx((0.35 - 5 * 0.1) / 0.2)
    assert figures["gaps"][1][2] == [0.3, 350.0]
    with pytest.raises(SystemExit, match="streams ended"):
        stall_figures([[0.0, 0.1]], sent=0.25, first=0.6, alone_s=0.2, prompt_tokens=100)


def test_repeats_have_medians() -> None:
    runs: list[dict[str, Any]] = [
        {"largest_ms": largest, "during_ms": {"p50": largest / 2}, "starved": largest == 8, "gaps": [largest]}
        for largest in (8.0, 2.0, 4.0)
    ]
    assert median_figures(runs) == {"largest_ms": 4.0, "during_ms": {"p50": 2.0}, "starved": True, "gaps": [4.0]}


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["many_users.py", *SMALL, *words])
    assert many_users.main() == 0


def test_every_scene_on_a_small_server(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "gaps.svg"
    with live_server(model=model, options={"max_queued_requests": 10_000}, api_keys=["a", "b"]) as server:
        where = ["--url", server.url, "--keys", "a", "b", "--json", str(report)]
        run(monkeypatch, *where, "--label", "one", "--repeats", "2")
        run(monkeypatch, *where, "--label", "two", "--scenes", "stalls", "--plot", str(picture))
        load = "--requests 3 --input-len 20 --output-len 4 --slo ttft=60,e2e=1e6x"
        run(monkeypatch, *where, "--label", "two", "--scenes", "none", "--loads", f"three={load}")
        starved = tmp_path / "starved.json"
        run(monkeypatch, *where[:-1], str(starved), "--scenes", "many", "--minutes", "0")
        front = server.front
        requests = server.on_loop(lambda: sum(front.metrics.outcomes.values()))
    one, two = json.loads(report.read_text())["rows"]
    assert (one["label"], two["label"]) == ("one", "two")
    assert one.keys() == {"label", "command", "stalls", "short", "many", "users", "loads"}
    assert two.keys() == {"label", "command", "stalls", "loads"}
    assert two["loads"]["three"]["options"] == load
    assert two["loads"]["three"]["goodput"]["requests"] == 3
    assert two["loads"]["three"]["alone"][0]["input_tokens"] == 20
    for scene in ("stalls", "short", "many", "users"):
        assert one[scene]["cpu"]
        assert one[scene]["repeats"] == 2
    assert len(one["stalls"]["gaps"]) == 2
    assert one["stalls"]["largest_ms"] > 0
    assert one["short"]["long_times_alone"] > 0
    assert (one["many"]["shorts_failed"], one["many"]["starved"]) == (0, False)
    assert one["many"]["shorts"] >= 1
    assert 0 <= one["users"]["served_before_it"] <= 6
    assert requests >= 2 * (4 + 4 + 4 + 8) + 4
    (other,) = json.loads(starved.read_text())["rows"]
    assert (other["many"]["starved"], other["many"]["long_times_alone"]) == (True, None)
    text = picture.read_text()
    assert "<svg" in text
    drawn = tmp_path / "again.svg"
    run(monkeypatch, "--draw", "--json", str(report), "--plot", str(drawn))
    assert drawn.stat().st_size > 0


def test_a_server_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.json"
    command = "kvanta serve stories260k --threads 1 --kv-cache-memory-bytes 16MiB"
    run(monkeypatch, "--serve", f"Kvanta={command}", "--scenes", "short", "--json", str(report))
    (row,) = json.loads(report.read_text())["rows"]
    assert (row["label"], row["command"]) == ("Kvanta", command)
    assert row["short"]["short_s"] > 0
