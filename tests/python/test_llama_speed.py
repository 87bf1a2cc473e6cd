"""benchmarks/llama_speed.py and depth_speed.py: what is read from programs, verdicts, and verified rates of our own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import depth_speed
import llama_speed
import pytest
from depth_speed import Work

from kvanta.checkpoint.resolve import resolve_model

_BENCH = """#!/bin/sh
echo "$@" >>{log}
echo 'loading [x]' >&2
echo '[ {{"build_commit": "abc", "build_number": 7, "n_prompt": 64, "n_gen": 0, "samples_ts": [ 10.0, 30.0 ]}},'
echo '{{"build_commit": "abc", "build_number": 7, "n_prompt": 0, "n_gen": 8, "samples_ts": [ 5.0 ]}} ]'
"""
_SWEEP = """#!/bin/sh
echo "$@" >>{log}
echo "llama_kv_cache_init: [1, 2]"
echo '{{"n_kv_max": 1024, "n_kv": 0, "speed_pp": 5.0}}'
echo '{{"n_kv_max": 1024, "n_kv": 512, "speed_pp": 4.0}}'
"""


def program(path: Path, text: str, log: Path) -> Path:
    path.write_text(text.format(log=log))
    path.chmod(0o755)
    return path


@pytest.fixture
def run(tmp_path: Path) -> llama_speed.Run:
    return llama_speed.Run(tmp_path / "model.gguf", (), threads=2, repeats=2)


def test_what_llama_bench_is_asked_and_says(tmp_path: Path, run: llama_speed.Run) -> None:
    log = tmp_path / "log"
    peer = llama_speed.LlamaCpp(program(tmp_path / "llama-bench", _BENCH, log), run)
    works = [Work("decode", 4096, 8), Work("prefill", 4096, 64)]
    assert peer.rates("q8_0", True, works) == [[5.0], [10.0, 30.0]]
    assert peer.rates("f16", False, works[:1]) == [[5.0]]
    assert peer.version == "7 (abc)"
    both, decode = log.read_text().splitlines()
    common = f"-m {run.gguf} -t 2 -r 2 -o json"
    assert both == f"{common} -ctk q8_0 -ctv q8_0 -fa 1 -d 4096 -p 64 -n 8"
    assert decode == f"{common} -ctk f16 -ctv f16 -fa 0 -d 4096 -p 0 -n 8"


def test_what_ik_llama_is_asked_and_says(tmp_path: Path, run: llama_speed.Run) -> None:
    log = tmp_path / "log"
    peer = llama_speed.IkLlamaCpp(program(tmp_path / "llama-bench", _BENCH, log), run)
    program(tmp_path / "llama-sweep-bench", _SWEEP, log)
    assert peer.rates("q4_0", True, [Work("decode", 100, 8)]) == [[10.0, 30.0]]  # the only row is of both
    assert peer.rates("q4_0", True, [Work("prefill", 0, 64)]) == [[10.0, 30.0]]
    assert peer.rates("q4_0", True, [Work("prefill", 512, 508)]) == [[4.0]]
    decode, prefill, sweep = log.read_text().splitlines()
    assert decode.endswith("-p 0 -n 0 -gp 100,8")
    assert prefill.endswith("-p 64 -n 0")
    assert " -d " not in prefill  # it has none
    assert " -c 1024 " in sweep
    with pytest.raises(SystemExit, match="no row at depth 700"):
        peer.rates("q4_0", True, [Work("prefill", 700, 64)])


def test_a_program_that_fails_or_says_nothing(tmp_path: Path, run: llama_speed.Run) -> None:
    broken = program(tmp_path / "broken", "#!/bin/sh\necho no such model >&2; exit 3\n", tmp_path)
    with pytest.raises(SystemExit, match="broken ended with 3: no such model"):
        llama_speed.LlamaCpp(broken, run).rates("f16", True, [Work("decode", 0, 8)])
    silent = program(tmp_path / "silent", "#!/bin/sh\necho done\n", tmp_path)
    with pytest.raises(SystemExit, match="no samples"):
        llama_speed.LlamaCpp(silent, run).rates("f16", True, [Work("decode", 0, 8)])


def test_works_take_turns_and_the_best_are_compared() -> None:
    turns: list[tuple[str, int, int]] = []

    def subject(name: str, cache: str, rates: list[float]) -> llama_speed.Subject:
        def measured(works: Sequence[Work]) -> list[list[float]]:
            turns.append((name, works[0].depth, len(works)))
            return [rates] * len(works)

        return llama_speed.Subject(name, cache, measured)

    subjects = [
        subject("llama.cpp", "f16", [9.0, 11.0, 10.0]),
        subject("llama.cpp", "q8_0", [20.0]),
        subject("ik_llama.cpp", "f16", [40.0]),
        subject("kvanta", "int4", [60.0]),
    ]
    works = [Work("decode", 0, 8), Work("decode", 64, 8), Work("prefill", 0, 64)]
    rows = llama_speed.measure(works, subjects, rounds=2)
    assert [(depth, many) for _, depth, many in turns] == [(0, 2)] * 8 + [(64, 1)] * 8
    names = [each.program for each in subjects]
    assert [name for name, _, _ in turns] == names * 4
    assert rows[0]["tokens_s"] == 10.0
    assert len(rows[0]["rates"]) == 6
    decode, prefill, deep = llama_speed.beside(rows)
    assert decode["llama_cpp"] == {"cache": "q8_0", "tokens_s": 20.0}
    assert decode["ik_llama_cpp"] == {"cache": "f16", "tokens_s": 40.0}
    assert decode["ours"] == {"int4": 60.0}
    assert (prefill["times_best"], deep["depth"]) == (1.5, 64)

    report = {"gguf": "a"}
    again = [row for row in rows if row["kind"] == "decode"]
    kept = llama_speed.earlier_rows({**report, "rows": rows}, report, again)
    assert {row["kind"] for row in kept} == {"prefill"}
    assert llama_speed.earlier_rows({"gguf": "b", "rows": rows}, report, again) == []


def options_of(**values: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    depth_speed.add_works(parser)
    given = {"weight_dtype": "int4", "max_model_len": None, **values}
    return argparse.Namespace(**{**vars(parser.parse_args([])), **given})


def test_own_rates_are_verified(capsys: pytest.CaptureFixture[str]) -> None:
    folder = resolve_model("stories260k").path
    options = options_of(decode=[0, 130], prefill=["40@128"], new_tokens=8, repeats=2, threads=1)
    works = depth_speed.works_of(options, 512)
    assert works == [Work("decode", 0, 8), Work("decode", 130, 8), Work("prefill", 128, 40)]
    rows = depth_speed.measure(folder, ["int8", "fp8_e4m3"], works, options)
    assert [row["cache"] for row in rows] == ["int8", "fp8_e4m3"] * 3
    assert all(len(row["rates"]) == 2 for row in rows)
    assert {row["ratio"] for row in rows if row["cache"] == "int8"} == {1.0}
    assert all(rate > 0 for row in rows for rate in row["rates"])
    assert capsys.readouterr().out.count("tokens/s") == 6


def test_runs_that_differ_give_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([[1, 2], [1, 2], [1, 3]])
    subject = depth_speed.Subject.__new__(depth_speed.Subject)
    monkeypatch.setattr(subject, "_prompt", lambda tokens, *seed: [1] * tokens, raising=False)
    monkeypatch.setattr(subject, "_run", lambda prompt, tokens: (next(answers), 1.0, 1.0), raising=False)
    with pytest.raises(SystemExit, match="no figure is worth printing"):
        list(subject.rates(Work("decode", 4, 1)))


def test_works_fit_the_model() -> None:
    assert depth_speed.works_of(options_of(decode=[]), 8192)[1] == Work("prefill", 7680, 508)
    with pytest.raises(SystemExit, match="the model takes 512"):
        depth_speed.works_of(options_of(decode=[512], prefill=[]), 512)


def test_own_rates_run_as_a_program() -> None:
    run = llama_speed.Run(resolve_model("stories260k").path, ("env", "KVANTA_ISA=portable"), threads=1, repeats=1)
    assert len(llama_speed.own_rates(run, "int4", "int8", [Work("prefill", 64, 20), Work("decode", 64, 3)])) == 2
