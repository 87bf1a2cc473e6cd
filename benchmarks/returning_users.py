"""Cost of a conversation's next turn when the users' histories exceed the prefix cache, per cache format.

    python benchmarks/returning_users.py smollm2 --json docs/results/returning-users.json

--users conversations run concurrently. Each begins with --first-tokens; every turn sends the whole history and
--turn-tokens more, and gets --output-tokens. The part of a history that is still in the prefix cache is not computed
again. --rounds turns of every user are measured, after the first one has filled the cache.

The engine has one thread, and rates are per second of its CPU time, independent of other load on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from more_users import REFERENCE, page_size, steps

from kvanta import _core
from kvanta.engine_options import engine_config
from kvanta.models import resolve_model
from kvanta.options import parse_bytes
from kvanta.plan import plan

FORMATS = ("bf16", "int8", "int4")


class Conversations:
    """Histories of all users."""

    def __init__(self, users: int, first_tokens: int, vocab: int) -> None:
        self._random = np.random.default_rng(11)
        self._vocab = vocab
        self.histories = [self._tokens(first_tokens) for _ in range(users)]

    def _tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(0, self._vocab, size=count)]

    def turn(self, engine: _core.Engine, round_: int, output_tokens: int) -> tuple[int, int, float]:
        """Runs the next turn of every user: prompt tokens, cached prompt tokens, CPU seconds."""
        prompts = {f"{round_}-{user}": history for user, history in enumerate(self.histories)}
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
        return count, sum(cached.values()), spent

    def say(self, turn_tokens: int) -> None:
        """Appends a message to the history of every user."""
        for history in self.histories:
            history.extend(self._tokens(turn_tokens))


def measure(options: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    """One row of the report."""
    page = page_size(name, options.page_size)
    longest = options.first_tokens + (options.rounds + 1) * (options.turn_tokens + options.output_tokens)
    planned = plan(str(folder), formats=[name], context=longest, options={"block_size": page})["formats"][0]
    remembered = min(options.users, parse_bytes(options.memory) // planned["sequence_bytes"])
    arguments = {
        "kv_cache_dtype": name,
        "kv_cache_memory_bytes": options.memory,
        "max_model_len": longest,
        "max_num_seqs": remembered,
        "max_num_batched_tokens": options.batched_tokens,
        "block_size": page,
        "threads": 1,
        "kv_cache_dir": str(options.kv_cache_dir / name) if options.kv_cache_dir else "",
        "kv_cache_dir_bytes": options.kv_cache_dir_bytes,
    }
    engine = _core.Engine(engine_config(str(folder), arguments))
    talks = Conversations(options.users, options.first_tokens, _core.read_model_info(str(folder)).vocab)
    talks.turn(engine, 0, options.output_tokens)
    prompts, cached, seconds = 0, 0, 0.0
    for round_ in range(1, options.rounds + 1):
        talks.say(options.turn_tokens)
        more = talks.turn(engine, round_, options.output_tokens)
        prompts, cached, seconds = prompts + more[0], cached + more[1], seconds + more[2]
    turns = options.rounds * options.users
    row = {
        "format": name,
        "page_size": page,
        "fitting_users": remembered,
        "prompt_tokens": prompts,
        "cached_share": cached / prompts,
        "turns_per_s": turns / seconds,
        "tokens_per_s": (prompts + turns * options.output_tokens) / seconds,
    }
    print(f"{name:18} {row['cached_share']:6.1%} from the cache, {row['turns_per_s']:.3f} turns/s", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--memory", default="96MiB")
    parser.add_argument("--kv-cache-dir", type=Path, help="prefix cache on disk, in a folder for each format")
    parser.add_argument("--kv-cache-dir-bytes", default="16GiB")
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--first-tokens", type=int, default=1600)
    parser.add_argument("--turn-tokens", type=int, default=96)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batched-tokens", type=int, default=128, help="tokens computed in one step")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page; 32 where a format requires it")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if REFERENCE not in options.formats:
        parser.error(f"--formats lacks {REFERENCE}, to which all others are compared")

    warnings.simplefilter("ignore")
    folder = resolve_model(options.model).path
    rows = [measure(options, name, folder) for name in options.formats]
    first = next(row for row in rows if row["format"] == REFERENCE)
    for row in rows:
        row["times"] = {"turns": row["turns_per_s"] / first["turns_per_s"]}
    report = {
        "model": options.model,
        "memory_bytes": parse_bytes(options.memory),
        **{
            name: getattr(options, name) for name in ("users", "first_tokens", "turn_tokens", "output_tokens", "rounds")
        },
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
