r"""Stalls of streams, waits of short prompts, starvation and fairness, as several users of one server feel them.

    python benchmarks/many_users.py --serve "Kvanta=kvanta serve MODEL --kv-cache-dtype int4" \
        "without the clock=kvanta serve MODEL --kv-cache-dtype int4 --max-step-ms 0" \
        --json docs/results/many-users.json --plot docs/results/many-users.png

    stalls  --streams answers are generated, and a prompt of --prompt tokens arrives: gaps of each stream before it,
            until its first token, and after that
    short   a prompt of --short tokens arrives --delay-s after one of --prompt tokens
    many    --per-minute short prompts a minute, until a long one has its first token, for at most --minutes
    users   one prompt of a user arrives --delay-s after --waiting prompts of another one

Every scene first measures its prompts alone on the idle server; "times alone" are of times to the first token. Servers
are any that speak OpenAI's API: of --url, or started by --serve LABEL=COMMAND one after the other, with {port} in the
command where it takes one ("kvanta serve" is this Python's, and gets its port by itself):

    --serve "llama.cpp=llama-server -m MODEL.gguf -c 40000 -np 8 --port {port}" "vLLM=V/bin/vllm serve M --port {port}"

--loads NAME=OPTIONS measures goodput under a load as well, by `kvanta bench serve` with these options:

    --loads "chat=--trace chat.jsonl --rate 2 --slo ttft=5x,itl=3x" "agents=--trace agents.jsonl --slo ttft=5x,itl=3x"

Two users are told apart by the field `user`, or by --keys. Figures are medians of --repeats. Scenes of an earlier run
with the same settings stay in the JSON file, so that versions and servers can be measured one by one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from many_users_scenes import SCENES, Shape, User, median_figures, users
from reports import earlier_rows
from server_process import KVANTA, free_port, server_process

from kvanta.cli.machine import cpu_name
from kvanta.loadgen.client import open_session
from kvanta.loadgen.target import find_target
from kvanta.terminal.pictures import check_picture, new_figure, save_figure

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 3600.0
_SERIES = "gaps"
_LOAD_FIGURES = ("goodput", "ttft_ms", "itl_ms", "completed", "failed", "duration_s", "output_throughput")


def commit() -> str:
    """The checkout's, with a mark if files have changed; empty without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


@contextlib.contextmanager
def served(command: str) -> Iterator[str]:
    """URL of a server that runs meanwhile."""
    port = free_port()
    words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
    if words[:2] == ["kvanta", "serve"]:
        words = [*KVANTA, *words[2:], "--port", str(port), "--no-log-requests"]
    with server_process(words, port, start_timeout_s=900.0) as server:
        yield server.url


async def measure(url: str, scenes: Sequence[str], shape: Shape, repeats: int, keys: Sequence[str]) -> dict[str, Any]:
    """Figures by scene. `keys`: none, one for all, or one for each of two users."""
    async with (
        open_session(_TIMEOUT_S, keys[0] if keys else None) as session,
        open_session(_TIMEOUT_S, keys[-1] if keys else None) as second,
    ):
        target = await find_target(session, url)
        user = User(session, target)
        figures = {}
        for scene in scenes:
            runs = []
            for _ in range(repeats):
                if scene == "users":
                    runs.append(await users(user, shape, user.named("b", second)))
                else:
                    runs.append(await SCENES[scene](user, shape))
                print(scene, {name: value for name, value in runs[-1].items() if name != _SERIES}, flush=True)
            figures[scene] = {"cpu": cpu_name(), "commit": commit(), "repeats": repeats, **median_figures(runs)}
    return figures


def measure_load(url: str, options: str, repeats: int, keys: Sequence[str]) -> dict[str, Any]:
    """Figures of `kvanta bench serve` with these options: of the run whose goodput is in the middle."""
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "report.json"
        words = [sys.executable, "-m", "kvanta", "bench", "serve", url, *shlex.split(options), "--json", str(file)]
        for _ in range(repeats):
            environment = {**os.environ, **({"OPENAI_API_KEY": keys[0]} if keys else {})}
            subprocess.run(words, check=True, env=environment)
            report = json.loads(file.read_text(encoding="utf-8"))
            (run,) = report["runs"]
            runs.append({**{name: run[name] for name in _LOAD_FIGURES}, "alone": report["alone"]})
    runs.sort(key=lambda run: float(run["goodput"]["request_throughput"]))
    return {"cpu": cpu_name(), "commit": commit(), "repeats": repeats, "options": options, **runs[len(runs) // 2]}


def write_plot(file: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Gaps of streams over time, a panel for each row that has them. Raises ResourceError."""
    shown = [row for row in rows if "stalls" in row]
    figure = new_figure(11, 1.4 + 2.6 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, row in zip(panels, shown, strict=True):
        stalls = row["stalls"]
        axes.axvspan(0, stalls["prompt_s"], color="#0b6e99", alpha=0.12, linewidth=0)
        for number, gaps in enumerate(stalls[_SERIES]):
            axes.plot(*zip(*gaps, strict=True), ".", markersize=3, color=f"C{number % 10}")
        axes.axhline(stalls["median_before_ms"], color="gray", linewidth=0.8, linestyle="--")
        axes.set_yscale("log")
        axes.set_ylabel("gap (ms)")
        axes.set_title(
            f"{row['label']}: largest gap {stalls['largest_ms']:,.0f} ms, {stalls['largest_times_median']:.1f} times "
            f"the median before; the prompt: {stalls['prompt_s']:.1f} s, {stalls['alone_s']:.1f} s alone",
            fontsize=10,
        )
        axes.grid(True, which="both", alpha=0.25, linewidth=0.6)
    panels[-1].set_xlabel("seconds since the prompt arrived; shaded until its first token")
    figure.suptitle("Gaps between the tokens of each stream while another user's prompt is computed", fontsize=11)
    save_figure(figure, file)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--serve", nargs="+", metavar="LABEL=COMMAND", help="servers to start, one after the other")
    where.add_argument("--url", help="a server that runs; see --label")
    where.add_argument("--draw", action="store_true", help="only draw --plot from --json")
    parser.add_argument("--label", default="server", help="name of the server of --url")
    parser.add_argument("--keys", nargs="+", default=[], metavar="KEY", help="API key, or one for each of two users")
    parser.add_argument("--scenes", nargs="+", choices=[*SCENES, "none"], default=list(SCENES))
    parser.add_argument("--loads", nargs="+", default=[], metavar="NAME=OPTIONS", help="loads of kvanta bench serve")
    parser.add_argument("--repeats", type=int, default=1)
    for each in fields(Shape):
        kind = float if isinstance(each.default, float) else int
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=kind, default=each.default, metavar="N")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", help="picture of the streams' gaps: .png, .svg or .pdf")
    options = parser.parse_args()
    if options.draw and not (options.json and options.plot):
        parser.error("--draw needs --json, which it reads, and --plot")
    if len(options.keys) > 2:
        parser.error(f"--keys: two users have {len(options.keys)} keys")
    for named in (*(options.serve or ()), *options.loads):
        if "=" not in named:
            parser.error(f"{named!r} has no name before a =")
    for load in options.loads:
        if "--goodput" not in load and "--slo" not in load:
            parser.error(f"--loads: {load!r} has no --slo")
    options.scenes = [scene for scene in options.scenes if scene != "none"]
    if options.plot:
        check_picture(options.plot)
    return options


def main() -> int:
    options = _options()
    if options.draw:
        write_plot(options.plot, json.loads(options.json.read_text(encoding="utf-8"))["rows"])
        return 0
    shape = Shape(**{each.name: getattr(options, each.name) for each in fields(Shape)})
    settings = asdict(shape)
    rows = {row["label"]: row for row in earlier_rows(options.json, settings)}
    servers = [server.partition("=")[::2] for server in options.serve] if options.serve else [(options.label, "")]
    for label, command in servers:
        print(f"{label}: {command or options.url}", flush=True)
        with served(command) if command else contextlib.nullcontext(options.url) as url:
            figures = asyncio.run(measure(url, options.scenes, shape, options.repeats, options.keys))
            loads = dict(rows.get(label, {}).get("loads", {}))
            for name, _, words in (load.partition("=") for load in options.loads):
                loads[name] = measure_load(url, words, options.repeats, options.keys)
        rows[label] = {**rows.get(label, {}), "label": label, "command": command or None, **figures, "loads": loads}
        if options.json:  # a later server may fail after hours
            text = json.dumps({**settings, "rows": list(rows.values())}, ensure_ascii=False)
            options.json.write_text(text + "\n", encoding="utf-8")
    if options.plot:
        write_plot(options.plot, list(rows.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
