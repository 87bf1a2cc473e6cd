"""Cost of a conversation's next turn when the users' histories exceed the prefix cache, per cache format.

    python benchmarks/returning_users.py smollm2 --json docs/results/returning-users.json

--users conversations run concurrently. Each begins with --first-tokens; every turn sends the whole history and
--turn-tokens more, and gets --output-tokens. The part of a history that is still in the prefix cache is not computed
again. --rounds turns of every user are measured, after the first one has filled the cache. Users take turns in the
same order in every round, which LRU likes least, or with --order random in another one each (seeded), as people do.

Rates are per second of the engine's CPU time, independent of other load on the machine.

With --kv-cache-dir, every format is measured without and with a prefix cache on disk of --kv-cache-dir-bytes, in a new
folder each; both must generate the same tokens:

    python benchmarks/returning_users.py smollm2 --kv-cache-dir /var/tmp --kv-cache-dir-bytes 512MiB --memory 50MiB
        --users 30 --first-tokens 2000 --order random --rounds 1 --threads 2 --formats bf16 int4
        --json docs/results/returning-users-disk.json

Rates are then per second of the wall clock, since the disk's threads run at the same time as the engine's; a round ends
when its pages are written. Rows of an earlier run with the same settings stay in the JSON file, so that formats
and --places can be measured one by one, the reference first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from more_users import REFERENCE, page_size, steps
from reports import earlier_rows

from kvanta import _core
from kvanta.checkpoint.resolve import resolve_model
from kvanta.engine.config import engine_config
from kvanta.fleet.plan import plan
from kvanta.options.option import parse_bytes

FORMATS = ("bf16", "int8", "int4")
SETTINGS = ("users", "first_tokens", "turn_tokens", "output_tokens", "rounds", "order", "threads")


class Exchange(NamedTuple):
    """One turn of every user, or several."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0

    def plus(self, more: Exchange) -> Exchange:
        return Exchange(
            self.prompt_tokens + more.prompt_tokens,
            self.cached_tokens + more.cached_tokens,
            self.cpu_seconds + more.cpu_seconds,
            self.wall_seconds + more.wall_seconds,
        )


class Conversations:
    """Histories of all users."""

    def __init__(self, users: int, first_tokens: int, vocab: int, order: str) -> None:
        self._order = np.random.default_rng(12) if order == "random" else None
        self._random = np.random.default_rng(11)
        self._vocab = vocab
        self.histories = [self._tokens(first_tokens) for _ in range(users)]

    def _tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(0, self._vocab, size=count)]

    def turn(self, engine: _core.Engine, round_: int, output_tokens: int) -> Exchange:
        """Runs the next turn of every user."""
        begin = time.monotonic()
        users = range(len(self.histories)) if self._order is None else self._order.permutation(len(self.histories))
        prompts = {f"{round_}-{user}": self.histories[user] for user in users}
        for name, prompt in prompts.items():
            sampling = _core.SamplingParams()
            sampling.max_tokens, sampling.ignore_eos, sampling.temperature = output_tokens, True, 0.0
            engine.add(name, prompt, sampling)
        count, spent = sum(map(len, prompts.values())), 0.0
        cached = dict.fromkeys(prompts, 0)
        for outputs, seconds in steps(engine):
            spent += seconds
            for each in outputs:
                if each.error:
                    raise SystemExit(f"error: {each.error}")
                prompts[each.id].extend(each.tokens)
                cached[each.id] = max(cached[each.id], each.cached_tokens)
        engine.flush_prefix_cache()
        return Exchange(count, sum(cached.values()), spent, time.monotonic() - begin)

    def digest(self) -> str:
        """SHA-256 of all histories."""
        return hashlib.sha256(json.dumps(self.histories).encode()).hexdigest()

    def say(self, turn_tokens: int) -> None:
        """Appends a message to the history of every user."""
        for history in self.histories:
            history.extend(self._tokens(turn_tokens))


@contextmanager
def new_folder(parent: Path | None) -> Iterator[str]:
    """Folder for a prefix cache on disk, or none."""
    if parent is None:
        yield ""
        return
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield folder


def measure(options: argparse.Namespace, name: str, model: str, parent: Path | None) -> dict[str, Any]:
    """One row of the report. parent: where the prefix cache on disk gets its folder, if there is one."""
    page = page_size(name, options.page_size)
    longest = options.first_tokens + (options.rounds + 1) * (options.turn_tokens + options.output_tokens)
    planned = plan(model, formats=[name], context=longest, options={"block_size": page})["formats"][0]
    remembered = min(options.users, parse_bytes(options.memory) // planned["sequence_bytes"])
    if remembered == 0:
        raise SystemExit(
            f"error: --memory {options.memory} holds no user of {name}: {planned['sequence_bytes']:,} bytes"
        )
    with new_folder(parent) as folder:
        arguments = {
            "kv_cache_dtype": name,
            "kv_cache_memory_bytes": options.memory,
            "max_model_len": longest,
            "max_num_seqs": remembered,
            "max_num_batched_tokens": options.batched_tokens,
            "block_size": page,
            "threads": options.threads,
            "kv_cache_dir": folder,
            "kv_cache_dir_bytes": options.kv_cache_dir_bytes,
        }
        engine = _core.Engine(engine_config(model, arguments))
        talks = Conversations(options.users, options.first_tokens, _core.read_model_info(model).vocab, options.order)
        talks.turn(engine, 0, options.output_tokens)
        total = Exchange()
        for round_ in range(1, options.rounds + 1):
            talks.say(options.turn_tokens)
            total = total.plus(talks.turn(engine, round_, options.output_tokens))
        stored_bytes = engine.stats()["disk"]["bytes"]
        del engine
    turns = options.rounds * options.users
    seconds = total.wall_seconds if options.kv_cache_dir else total.cpu_seconds
    row = {
        "format": name,
        "disk": parent is not None,
        "page_size": page,
        "fitting_users": remembered,
        "prompt_tokens": total.prompt_tokens,
        "cached_share": total.cached_tokens / total.prompt_tokens,
        "stored_mib": stored_bytes / 2**20,
        "turns_per_s": turns / seconds,
        "tokens_per_s": (total.prompt_tokens + turns * options.output_tokens) / seconds,
        "histories_sha256": talks.digest(),
    }
    place = "with the disk" if parent else ""
    print(f"{name:8} {place:14} {row['cached_share']:6.1%} cached, {row['turns_per_s']:.3f} turns/s", flush=True)
    return row


def check_histories(rows: list[dict[str, Any]]) -> None:
    """Raises SystemExit if a format has other histories with a disk than without."""
    digests: dict[str, str] = {}
    for row in rows:
        if digests.setdefault(row["format"], row["histories_sha256"]) != row["histories_sha256"]:
            raise SystemExit(f"error: {row['format']} generates other tokens with a disk than without")


def beside_others(rows: list[dict[str, Any]]) -> None:
    """Adds each rate as a multiple of the reference's with the same tiers, and of the same format's without a disk."""
    rates = {(row["format"], row["disk"]): row["turns_per_s"] for row in rows}
    for row in rows:
        row["times"] = {"turns": row["turns_per_s"] / rates[REFERENCE, row["disk"]]}
        if row["disk"]:
            row["times"]["without_disk"] = row["turns_per_s"] / rates[row["format"], False]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--memory", default="96MiB")
    parser.add_argument("--kv-cache-dir", type=Path, help="also with a prefix cache on disk in a new folder below")
    parser.add_argument("--kv-cache-dir-bytes", default="16GiB")
    parser.add_argument("--places", nargs="+", choices=("memory", "disk"), default=["memory", "disk"])
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--first-tokens", type=int, default=1600)
    parser.add_argument("--turn-tokens", type=int, default=96)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--order", choices=("fixed", "random"), default="fixed", help="of the users in every round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batched-tokens", type=int, default=128, help="tokens computed in one step")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page; 32 where a format requires it")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = {
        "model": options.model,
        "memory_bytes": parse_bytes(options.memory),
        "kv_cache_dir_bytes": parse_bytes(options.kv_cache_dir_bytes) if options.kv_cache_dir else 0,
        **{name: getattr(options, name) for name in SETTINGS},
    }
    places = options.places if options.kv_cache_dir else ["memory"]
    parents = {"memory": None, "disk": options.kv_cache_dir}
    asked = [(name, place == "disk") for name in options.formats for place in places]
    rows = [row for row in earlier_rows(options.json, settings) if (row["format"], row["disk"]) not in asked]
    known = {*asked, *((row["format"], row["disk"]) for row in rows)}
    for name, disk in asked:
        for other in ((REFERENCE, disk), (name, False)):
            if other not in known:
                parser.error(
                    f"{name} is compared with {other[0]} {'with' if other[1] else 'without'} a disk: not measured"
                )

    warnings.simplefilter("ignore")
    model = str(resolve_model(options.model).path)
    rows += [measure(options, name, model, parents[place]) for name in options.formats for place in places]
    check_histories(rows)
    beside_others(rows)
    report = {**settings, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
