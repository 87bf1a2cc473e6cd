"""The prefix cache on disk across processes: kill -9 under load, a full disk, the commands, metrics."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import kvanta

from kvanta import LLM, SamplingParams, _core

# Prompts that share beginnings; prints each answer as it comes.
_WORKER = """
import json, random, resource, signal, sys
folder, seed, rounds, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from kvanta import LLM, SamplingParams, _core
import warnings
warnings.showwarning = lambda message, *_, **__: print(json.dumps({"warning": str(message)}), flush=True)
llm = LLM("stories260k", kv_cache_dtype="int8", max_model_len=512, block_size=16, threads=1,
          kv_cache_memory_bytes="1MiB", kv_cache_dir=folder)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
print(json.dumps({"ready": True}), flush=True)
chosen = random.Random(seed)
for _ in range(rounds):
    stem = chosen.randrange(6)
    length = chosen.randrange(40, 300)
    prompt = [3 + (stem * 7 + i * i) % 400 for i in range(length)]
    out = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    print(json.dumps({"stem": stem, "length": length, "tokens": list(out[0].outputs[0].token_ids),
                      "cached": out[0].num_cached_tokens}), flush=True)
print(json.dumps({"disk": llm.stats()["disk"]}), flush=True)
"""


def _start(folder: Path, seed: int, rounds: int, limit: int = 0) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _WORKER, str(folder), str(seed), str(rounds), str(limit)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def _answers(lines: list[str]) -> list[dict[str, Any]]:
    return [row for row in (json.loads(line) for line in lines if line.endswith("}\n")) if "tokens" in row]


@pytest.fixture(scope="module")
def cold() -> LLM:
    return LLM(
        "stories260k", kv_cache_dtype="int8", max_model_len=512, block_size=16, threads=1, enable_prefix_caching=False
    )


def _check(answers: list[dict[str, Any]], cold: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    for row in answers:
        prompt = [3 + (row["stem"] * 7 + i * i) % 400 for i in range(row["length"])]
        want = cold.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids
        assert row["tokens"] == list(want), row


def test_kill_9_under_load_loses_only_unfinished_pages(tmp_path: Path, cold: LLM) -> None:
    """Any byte of a page that is used wrongly changes the answer."""
    chosen = random.Random(5)
    for seed in range(6):
        worker = _start(tmp_path, seed, 100_000)
        assert worker.stdout is not None
        lines = [worker.stdout.readline()]  # ready
        lines += [worker.stdout.readline() for _ in range(chosen.randrange(1, 12))]
        time.sleep(chosen.random() * 0.02)
        worker.send_signal(signal.SIGKILL)
        lines += worker.stdout.readlines()
        worker.wait()
        worker.stdout.close()
        _check(_answers(lines)[-3:], cold)
    done = kvanta("cache", "verify", str(tmp_path))
    assert done.returncode == 0, done.stdout
    last = _start(tmp_path, 99, 12)
    answers = _answers(last.communicate(timeout=600)[0].splitlines(keepends=True))
    _check(answers, cold)
    assert answers[0]["cached"] > 0


def test_two_processes_share_a_folder(tmp_path: Path, cold: LLM) -> None:
    workers = [_start(tmp_path, seed, 25) for seed in (1, 1)]
    for worker in workers:
        lines = worker.communicate(timeout=600)[0].splitlines(keepends=True)
        assert json.loads(lines[-1])["disk"]["damaged_files"] == 0
        _check(_answers(lines), cold)
    assert kvanta("cache", "verify", str(tmp_path)).returncode == 0


def test_a_full_disk_is_told_once(tmp_path: Path, cold: LLM) -> None:
    """Files cannot grow beyond 2,000 bytes: writes fail in the middle of a page."""
    lines = _start(tmp_path, 3, 10, limit=2000).communicate(timeout=600)[0].splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    told = [row["warning"] for row in rows if "cannot be written" in row.get("warning", "")]
    assert len(told) == 1
    assert rows[-1]["disk"]["write_errors"] > 0
    _check(_answers(lines), cold)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".json"]


def test_the_commands_show_and_clear_a_folder(tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    llm = LLM("stories260k", kv_cache_dtype="int8", block_size=16, max_model_len=256, kv_cache_dir=folder)
    llm.generate([{"prompt_token_ids": list(range(3, 103))}], SamplingParams(max_tokens=1))
    del llm
    listed = kvanta("cache", "ls", folder, "--json", "-")
    [row] = json.loads(listed.stdout)["entries"]
    assert (row["kv_cache_dtype"], row["page_size"], row["pages"]) == ("int8", 16, 6)
    assert "int8" in kvanta("cache", "ls", folder).stdout
    victim = next(path for path in Path(folder).rglob("*-0q"))
    shown = kvanta("cache", "show", str(victim))
    assert shown.returncode == 0
    assert re.search(r"^  tokens +16: \d+, ", shown.stdout, re.MULTILINE)
    assert re.search(r"^  0 to 4 +int8 +4 +8 +int8 +int8$", shown.stdout, re.MULTILINE)
    page = json.loads(kvanta("cache", "show", str(victim), "--json", "-").stdout)
    assert (page["version"], page["record"], page["group"], page["fault"]) == (1, "quantized", 0, None)
    assert victim.name == f"{page['key']}-0q"
    assert page["identity_key"].startswith(victim.parents[1].name)
    assert page["token_ids"][0] in range(3, 99, 16)
    assert page["token_ids"] == list(range(page["token_ids"][0], page["token_ids"][0] + 16))
    assert page["identity"]["pages"]["page_size"] == 16
    assert page["payload_bytes"] + 112 + 4 * 16 == victim.stat().st_size
    victim.write_bytes(victim.read_bytes()[:-1])
    verified = kvanta("cache", "verify", folder)
    assert verified.returncode == 1
    assert victim.name in verified.stdout
    damaged = kvanta("cache", "show", str(victim))
    assert damaged.returncode == 1
    assert "do not make a file of" in damaged.stdout
    no_file = kvanta("cache", "show", folder)
    assert no_file.returncode == 2
    assert "not a regular file" in no_file.stderr
    assert kvanta("cache", "clear", folder).returncode == 0
    assert "no cached prefixes" in kvanta("cache", "ls", folder).stdout
    missing = kvanta("cache", "ls", str(tmp_path / "none"))
    assert missing.returncode == 2
    assert len(missing.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "content",
    [
        "[1, 2]",
        '{"pages": {"page_size": "zz"}}',
        '{"pages": 7, "architecture": ["x"]}',
        "[" * 200_000,
        '{"architecture": "\\u001b]0;x\\u0007", "pages": {"page_size": 1e999}}',
        json.dumps({"architecture": "x" * (2 << 20)}),
        "\udcff",
    ],
    ids=range(7),
)
def test_an_identity_that_is_none_hides_no_other(tmp_path: Path, content: str) -> None:
    """Whoever can write to the folder may write anything."""
    llm = LLM("stories260k", kv_cache_dtype="int8", block_size=16, max_model_len=256, kv_cache_dir=str(tmp_path))
    llm.generate([{"prompt_token_ids": list(range(3, 40))}], SamplingParams(max_tokens=1))
    del llm
    [own] = tmp_path.iterdir()
    other = own.with_name("0" * len(own.name))
    shutil.copytree(own, other)
    (other / "identity.json").write_bytes(content.encode(errors="surrogateescape"))
    for action, status in (("ls", 0), ("verify", 1)):
        shown = kvanta("cache", action, str(tmp_path))
        assert (shown.returncode, shown.stderr) == (status, "")
        assert "int8" in shown.stdout
        assert len(shown.stdout) < 2000
        assert "\x1b" not in shown.stdout
        entries = json.loads(kvanta("cache", action, str(tmp_path), "--json", "-").stdout)["entries"]
        assert [entry["page_size"] for entry in entries] == [None, 16]
        assert entries[0]["kv_cache_dtype"] == "?"
    file = next(other.rglob("*-0q"))
    shown = kvanta("cache", "show", str(file))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "whose text is not in the folder above" in shown.stdout
    assert kvanta("cache", "clear", str(tmp_path)).returncode == 0


@pytest.mark.parametrize(
    "identity",
    [
        "[1, 2]",
        '{"architecture": ["x"], "pages": 7}',
        '{"pages": {"layers": [7, {"layers": 1, "k": 3}, {"layers": [0, [1]], "scheme": "\\u001b]0;x\\u0007"}]}}',
        '{"pages": ' + "[" * 20_000 + "]" * 20_000 + "}",
        json.dumps({"architecture": "x" * 100_000, "weights": "\x1b[2J", "isa": None}),
    ],
    ids=range(5),
)
def test_a_page_whose_identity_says_anything(monkeypatch: pytest.MonkeyPatch, identity: str) -> None:
    """A file that describes itself is whole where whoever wrote it made it so."""
    page = SimpleNamespace(
        version=2,
        identity_key="ab" * 32,
        key="cd" * 32,
        identity=identity,
        group=0,
        exact=True,
        tokens=[1, 2],
        payload_bytes=3,
        checksum="0" * 16,
        fault="",
    )
    monkeypatch.setattr(_core, "show_page_file", lambda path: page)
    shown = kvanta("cache", "show", "a page")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "\x1b" not in shown.stdout
    assert len(shown.stdout) < 3000
    assert json.loads(kvanta("cache", "show", "a page", "--json", "-").stdout)["token_ids"] == [1, 2]


def test_statistics_and_bad_options(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "kv_cache_dtype": "int8",
        "block_size": 16,
        "max_model_len": 256,
        "kv_cache_dir": str(tmp_path),
    }
    prompt = [{"prompt_token_ids": list(range(3, 103))}]
    LLM("stories260k", **options).generate(prompt, SamplingParams(max_tokens=1))
    llm = LLM("stories260k", **options)
    out = llm.generate(prompt, SamplingParams(max_tokens=1))
    assert out[0].num_cached_tokens == 96
    disk = llm.stats()["disk"]
    assert disk["hit_tokens"] == disk["lookup_tokens"] == 96
    assert disk["read_bytes"] > 0
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        LLM("stories260k", enable_prefix_caching=False, kv_cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match="kv_cache_dir_bytes = 0: must be at least 1"):
        LLM("stories260k", kv_cache_dir=str(tmp_path), kv_cache_dir_bytes=0)
