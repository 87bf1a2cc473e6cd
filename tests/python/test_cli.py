"""The command kvanta as a user meets it: answers, errors, exit status."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from command_line import SMALL, kvanta, kvanta_process
from tiny_checkpoints import write_checkpoint
from tiny_gguf import TinyModel, write_gguf

from kvanta.cli import report_errors
from kvanta.cli.report import write_report


def test_options_are_checked_before_the_model_is_looked_for() -> None:
    """A hub id would be downloaded first."""
    for words in (["generate", "organization/model", "x"], ["serve", "organization/model", "--port", "0"]):
        done = kvanta(*words, "--dtype", "float17")
        assert done.returncode == 2
        assert "dtype must be one of auto" in done.stderr.splitlines()[-1]


def test_generate() -> None:
    done = kvanta_process("generate", "stories260k", "Once upon a time", "--max-tokens", "12", *SMALL)
    assert done.returncode == 0
    assert done.stdout.startswith(", there was a little girl")
    assert done.stdout.endswith("\n")
    (line,) = done.stderr.splitlines()
    assert "12 tokens" in line
    assert "tokens/s" in line
    assert "1,280 bytes/token" in line


def test_generate_reads_the_prompt_from_stdin() -> None:
    words = ["generate", "--model-path", "stories260k", "--max-tokens", "12", *SMALL]
    piped = kvanta_process(*words, stdin="Once upon a time\n")
    given = kvanta("generate", "stories260k", "Once upon a time", "--max-tokens", "12", *SMALL)
    assert piped.stdout == given.stdout


def test_generate_json(tmp_path: Path) -> None:
    words = ["generate", "stories260k", "--kv-cache-dtype", "int8", "Once upon a time", "--max-tokens", "9", *SMALL]
    report = json.loads(kvanta(*words, "--json", "-").stdout)
    assert report["generated_tokens"] == len(report["token_ids"]) == 9
    assert report["finish_reason"] == "length"
    assert report["kv_cache_dtype"] == "int8"
    assert (report["prompt_tokens"], report["ranks"]) == (5, 1)
    done = kvanta(*words, "--json", str(tmp_path / "report.json"))
    assert done.stdout == report["text"] + "\n"
    assert json.loads((tmp_path / "report.json").read_text())["token_ids"] == report["token_ids"]


def test_generate_reports_the_bytes_that_were_held() -> None:
    words = ["generate", "stories260k", "Once upon a time", *SMALL, "--block-size", "16"]
    report = json.loads(kvanta(*words, "--json", "-", "--max-tokens", "30").stdout)
    assert report["cache_bytes"] == 3 * 16 * report["bytes_per_token"]  # 34 tokens in pages of 16
    assert kvanta(*words, "--max-tokens", "30").stderr.endswith("bytes/token, 60.0 KiB held]\n")
    assert kvanta(*words, "--max-tokens", "1").stderr.endswith("bytes/token]\n")  # freed with its only token


FIGURES: dict[str, Any] = {
    "exact_bytes": 0,
    "generated_tokens": 1,
    "tokens_per_second": 0.0,
    "seconds_to_first_token": 0.0,
    "kv_cache_dtype": "fp8",
    "bytes_per_token": 1,
    "cache_bytes": None,
    "saturated": 0,
    "draft_tokens": 0,
    "ranks": 1,
}


@pytest.mark.parametrize(("unit", "ending"), [(True, "clipped: it needs scales]"), (False, "clipped]")])
def test_what_to_do_about_clipped_values(unit: bool, ending: str) -> None:
    from kvanta.terminal.chat.generation_report import closing_line

    assert closing_line({**FIGURES, "saturated": 7, "unit_scales": unit}).endswith(ending)


def test_generate_names_the_exact_pages(tmp_path: Path) -> None:
    """The first page of 34 tokens of int4, in pages of 16, and the open one are in bf16."""
    from kvanta.terminal.chat.generation_report import closing_line

    words = ["generate", str(write_checkpoint(tmp_path / "model")), "Once upon a time", "--block-size", "16"]
    words += ["--max-tokens", "30", "--ignore-eos", "--threads", "1", "--json", "-", "--kv-cache-dtype"]
    report = json.loads(kvanta(*words, "int4").stdout)
    exact_page = 16 * 2 * 2 * 2 * 64 * 2  # tokens, layers, K and V, heads, channels, bytes
    assert report["exact_bytes"] == 2 * exact_page
    assert report["cache_bytes"] == 16 * report["bytes_per_token"] + 2 * exact_page
    assert closing_line(report).endswith(" held, of it 32.0 KiB exact pages]")
    report = json.loads(kvanta(*words, "int8").stdout)
    assert report["exact_bytes"] == 0
    assert closing_line(report).endswith(" held]")


@pytest.mark.parametrize(("ranks", "ending"), [(1, "1 bytes/token, 64 B held]"), (2, "64 B held on rank 0 of 2]")])
def test_bytes_are_those_of_one_rank(ranks: int, ending: str) -> None:
    from kvanta.terminal.chat.generation_report import closing_line

    assert closing_line({**FIGURES, "cache_bytes": 64, "ranks": ranks}).endswith(ending)


def test_generate_with_the_tokenizer_of_another_folder(tmp_path: Path) -> None:
    from kvanta.checkpoint.resolve import SHIPPED

    source = SHIPPED / "stories260k"
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "Once upon a time"}))
    words = ["generate", "stories260k", "anything", "--max-tokens", "12", *SMALL, "--tokenizer", str(tmp_path)]
    assert ", there was a little girl" in kvanta(*words).stdout


def test_generate_stops() -> None:
    words = ["generate", "stories260k", "Once upon a time", *SMALL, "--max-tokens", "40"]
    assert kvanta(*words, "--stop", "girl", "xyz").stdout == ", there was a little \n"
    assert kvanta(*words, "--stop-regex", "gi[a-z]l", "xyz").stdout == ", there was a little girl\n"


def test_sampling_repeats_with_its_seed() -> None:
    words = ["generate", "stories260k", "Once upon a time", *SMALL, "--max-tokens", "20", "--temperature", "1"]
    assert kvanta(*words, "--seed", "3").stdout == kvanta(*words, "--seed", "3").stdout
    assert kvanta(*words, "--seed", "3").stdout != kvanta(*words, "--seed", "4").stdout


def test_options_of_other_engines_are_accepted_with_a_line() -> None:
    words = [
        "--trust-remote-code",
        "--gpu-memory-utilization",
        "0.9",
        "--data-parallel-size=1",
        "--disable-radix-cache",
    ]
    done = kvanta("generate", "stories260k", "Hi", "--max-tokens", "2", *SMALL, *words)
    assert done.returncode == 0
    notes = [line for line in done.stderr.splitlines() if line.startswith("kvanta:")]
    assert len(notes) == 3
    assert "no code of a model is run" in notes[0]


BAD: dict[str, tuple[list[str], str]] = {
    "no such command": (["gnerate"], "did you mean generate"),
    "no such option": (["--frobnicate"], "--frobnicate"),
    "misspelt option": (["generate", "stories260k", "x", "--kv-cache-dtpye", "int8"], "did you mean --kv-cache-dtype"),
    "no model": (["generate"], "MODEL is missing"),
    "nothing": (["serve"], "MODEL is missing: give a Hugging Face id, a folder"),
    "no model, and options that are lists": (
        ["plan", "--memory", "1GiB"],
        "MODEL is missing: give a Hugging Face id, a folder",
    ),
    "no config file": (["serve", "stories260k", "--config"], "--config needs a file"),
    "a negative seed": (["generate", "stories260k", "x", "--seed", "-1"], r"seed: -1 is not in 0\.\.1"),
    "an infinite temperature": (["generate", "stories260k", "x", "--temperature", "1e300"], r"in \[0, 3.4e\+38\]"),
    "no folder for the figures": (["eval", "stories260k", "--json", "/no/such/f.json"], "no folder '/no/such'"),
    "no folder for the scales": (["calibrate", "stories260k", "--out", "/no/such/f.json"], "no folder '/no/such'"),
    "no folder for the scheme": (["eval", "x", "--search", "6", "--scheme", "/no/f.json"], "no folder '/no'"),
    "a folder for the figures": (["generate", "stories260k", "x", "--json", "/tmp"], "'/tmp' is a folder"),
    "no such model": (["generate", "nosuch", "x"], "stories260k, smollm2"),
    "misspelt model": (["generate", "storys260k", "x"], "did you mean stories260k"),
    "misspelt config": (["plan", "llama-3.1-8"], "did you mean llama-3.1-8b"),
    "MODEL after a list": (["serve", "--api-key", "abc", "stories260k"], "--api-key took 'abc' and 'stories260k'"),
    "no such shell": (["completion", "cmd"], "cmd.*bash"),
    "no such folder": (["plan", "/no/such/folder"], "/no/such/folder"),
    "model twice": (["plan", "stories260k", "--model", "stories260k"], "twice"),
    "too many words": (["generate", "stories260k", "x", "y"], "'y'"),
    "no such format": (["generate", "stories260k", "x", "--kv-cache-dtype", "int9"], "int9.*int8"),
    "not a number": (["generate", "stories260k", "x", "--max-tokens", "many"], "many"),
    "out of range": (["generate", "stories260k", "x", "--top-p", "1.5"], "--top-p must .* got 1.5"),
    "a value missing": (["generate", "stories260k", "x", "--max-tokens"], "--max-tokens"),
    "chat and raw": (["generate", "stories260k", "x", "--chat", "--raw"], "--raw"),
    "chat without template": (["generate", "stories260k", "x", "--chat", *SMALL], "no chat template"),
    "prompt too long": (["generate", "stories260k", "a " * 600, *SMALL], "512"),
    "not a size": (["plan", "stories260k", "--memory", "lots"], "lots"),
    "context too long": (["plan", "stories260k", "--context", "4096"], "4096"),
    "format that does not fit": (["plan", "stories260k", "--formats", "mla_int4"], "mla_int4 stores the latents"),
    "formats twice": (["plan", "stories260k", "--formats", "int8", "--kv-cache-dtype", "fp8"], "give one of them"),
    "not a GGUF": (["convert", "/etc/hostname", "out"], "GGUF"),
    "nothing to convert": (["convert", "nowhere.gguf", "out"], "nowhere.gguf"),
    "an empty prompt": (["generate", "stories260k", ""], "the prompt is empty"),
    "PROMPT after a list": (["generate", "stories260k", "--stop", ".", "x"], "--stop took '.' and 'x'; put PROMPT"),
    "an empty standard input": (["generate", "stories260k"], "the prompt is empty"),
    "length that is a word": (["plan", "stories260k", "--max-model-len", "abc"], "--max-model-len.*'abc'"),
    "length with a fraction": (["plan", "stories260k", "--max-model-len", "100.5"], "--max-model-len.*'100.5'"),
    "no such tokenizer": (["generate", "stories260k", "x", "--tokenizer", "nosuch"], "no model 'nosuch'"),
    "too many heads": (
        ["bench", "attention", "--threads", "1", "--heads", str(4 * 10**12)],
        "heads must .* got 4000000000000",
    ),
    "a format that is not UTF-8": (["bench", "attention", "--threads", "1", "--formats", "\udcff"], "a format must"),
    "a dtype that is not UTF-8": (["plan", "stories260k", "--weight-dtype", "\udcff"], "--weight-dtype must be a text"),
    "no such benchmark": (["bench", "everything"], "everything"),
    "no such weights": (["bench", "linear", "--threads", "1", "--weights", "int3"], "int3.*int8"),
    "no layer": (["bench", "linear", "--layers", "576"], "a layer is '576'"),
    "too large a layer": (["bench", "linear", "--threads", "1", "--layers", "1x9999999"], "1 x 9999999"),
    "no rows": (["bench", "linear", "--rows", "0"], "rows are"),
    "no threads": (["bench", "attention", "--threads", "0"], "threads"),
    "no layers": (["bench", "attention", "--threads", "1", "--layers", "0"], "layers"),
    "two shapes": (["bench", "attention", "--shapes", "short", "--context", "9"], "--shapes and --context"),
}


@pytest.mark.parametrize(("words", "reason"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_status_2(words: list[str], reason: str) -> None:
    done = kvanta(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvanta: error: ")
    assert re.search(reason, line)


@pytest.mark.parametrize("case", ["no such option", "a dtype that is not UTF-8", "prompt too long"])
def test_a_process_says_what_main_does(case: str) -> None:
    words, _ = BAD[case]
    process, here = kvanta_process(*words), kvanta(*words)
    assert (process.returncode, process.stdout, process.stderr) == (2, here.stdout, here.stderr)


def test_a_cache_folder_whose_name_is_not_utf8() -> None:
    done = kvanta_process("cache", "ls", os.fsdecode(b"/tmp/\xff"))
    assert done.returncode == 2
    assert "PATH must be a text of valid Unicode" in done.stderr


@pytest.mark.parametrize("words", ["--version", "formats", "generate stories260k x --max-tokens 2 --threads 1"])
def test_an_output_that_cannot_be_written(words: str) -> None:
    command = shlex.join([sys.executable, "-m", "kvanta", *words.split()])
    for redirection, status, reason in ((">&-", 0, ""), (">/dev/full", 1, "No space left on device")):
        line = f"{command} {redirection}"
        done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert done.returncode == status, done.stderr
        assert reason in done.stderr
        assert "internal error" not in done.stderr


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_a_folder_whose_name_is_not_utf8(command: str, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    done = kvanta(command, str(folder), stdin="x")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.search("not a path.*utf-8", line)


def test_a_terminal_without_unicode() -> None:
    done = kvanta_process("plan", "stories260k", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?" in done.stdout
    words = ["generate", "stories260k", "\u65e5\u672c", "--max-tokens", "3", *SMALL, "--json", "-"]
    report = kvanta_process(*words, PYTHONIOENCODING="ascii").stdout
    assert json.loads(report)["token_ids"] == json.loads(kvanta(*words).stdout)["token_ids"]


def test_a_fault_of_ours_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty() -> int:
        raise KeyError("two\nlines")

    monkeypatch.delenv("KVANTA_DEBUG", raising=False)
    assert report_errors(faulty) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvanta: error: internal error: KeyError: ")
    assert "please report it; KVANTA_DEBUG=1" in line
    monkeypatch.setenv("KVANTA_DEBUG", "1")
    assert report_errors(faulty) == 1
    assert "Traceback" in capsys.readouterr().err


def test_stdin_that_is_not_utf8() -> None:
    done = kvanta("generate", "stories260k", stdin=b"ab\xff")
    assert done.returncode == 2
    assert "byte 2 is 0xff" in done.stderr


def test_memory_that_does_not_suffice_is_a_failure() -> None:
    done = kvanta("generate", "stories260k", "x", "--kv-cache-memory-bytes", "1000TiB")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvanta: error: ")


def test_weights_that_do_not_fit_are_a_failure() -> None:
    done = kvanta("plan", "stories260k", "--memory", "1")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert re.search(r"1 B of memory .*'stories260k' has 1015\.8 KiB of weights", line)


def test_a_report_that_cannot_be_written() -> None:
    done = kvanta("formats", "--json", "/dev/full")
    assert done.returncode == 1
    assert "cannot write" in done.stderr


def test_plan_names_the_storage_of_the_weights() -> None:
    words = ("plan", "llama-3.1-8b", "--memory", "24GiB", "--formats", "int4")
    assert "billion, bfloat16)" in kvanta(*words).stdout
    assert "billion, int4)" in kvanta(*words, "--weight-dtype", "int4").stdout


@pytest.mark.parametrize("command", ["plan", "serve"])
def test_help_gives_sizes_in_units(command: str) -> None:
    text = " ".join(kvanta(command, "--help=prefix", COLUMNS="110").stdout.split())
    assert "removed first [16GiB]" in text
    assert "17179869184" not in text


def test_plan_counts_what_the_engine_allocates(tmp_path: Path) -> None:
    from kvanta import LLM

    model = TinyModel(head_dim=64, heads=2, kv_heads=1)
    home = {"KVANTA_HOME": str(tmp_path / "home")}
    gguf_file = str(write_gguf(tmp_path / "m.gguf", model, model.weights()))
    done = kvanta("plan", gguf_file, "--memory", "64MiB", "--context", "200", "--json", "-", **home)
    report = json.loads(done.stdout)
    assert report["memory_bytes"] == 64 * 2**20
    rows = {row["name"]: row for row in report["formats"]}
    assert {"bf16", "fp8_e4m3", "int8", "int4"} <= rows.keys()
    folder = next((tmp_path / "home" / "models").iterdir())
    for name, row in rows.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of scales that were not given
            llm = LLM(folder, kv_cache_dtype=name, kv_cache_memory_bytes="8MiB", threads=1)
        assert row["bytes_per_token"] == llm.stats()["bytes_per_token"]
        cache = report["memory_bytes"] - report["weight_bytes"]
        exact_pages = 2 * 64 * rows["bf16"]["bytes_per_token"]  # int4's open and first page
        assert 0 <= cache - row["tokens"] * row["bytes_per_token"] < 64 * row["bytes_per_token"] + exact_pages
        assert row["sequences"] <= cache // (200 * row["bytes_per_token"])
        assert row["ratio_to_bf16"] == pytest.approx(rows["bf16"]["bytes_per_token"] / row["bytes_per_token"])
    assert rows["int8"]["bits_per_element"] == 8 + 16 / 64
    assert rows["int4"]["bits_per_element"] == 4.5
    assert rows["bf16"]["bytes_per_token"] == 2 * 2 * 64 * 2  # layers, sides, channels, bytes


def test_convert(tmp_path: Path) -> None:
    model = TinyModel()
    gguf_file = write_gguf(tmp_path / "m.gguf", model, model.weights())
    done = kvanta("convert", str(gguf_file), str(tmp_path / "out"))
    assert done.returncode == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    words = ("A", "--max-tokens", "5", "--dtype", "float32", *SMALL)
    from_file = kvanta("generate", str(gguf_file), *words, KVANTA_HOME=str(tmp_path / "home"))
    from_folder = kvanta("generate", str(tmp_path / "out"), *words)
    assert from_file.returncode == from_folder.returncode == 0
    assert from_file.stdout == from_folder.stdout


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    assert report_errors(interrupted) == 130
    assert capsys.readouterr().err.strip() == "kvanta: interrupted"


def test_a_closed_pipe_ends_quietly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvanta", "generate", "stories260k", "Once", *SMALL, "--max-tokens", "200"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    process.wait(timeout=60)


def test_reports_are_json_whatever_their_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A format that has failed may have an infinite perplexity."""
    report = {"ppl": math.inf, "rows": [{"kl": math.nan}, {"kl": 0.5}], "pair": (1, -math.inf), "name": "NaN"}
    expected = {"ppl": None, "rows": [{"kl": None}, {"kl": 0.5}], "pair": [1, None], "name": "NaN"}
    write_report(str(tmp_path / "r.json"), report, "")
    assert json.loads((tmp_path / "r.json").read_text()) == expected
    capsys.readouterr()
    write_report("-", report, "")
    assert json.loads(capsys.readouterr().out) == expected
