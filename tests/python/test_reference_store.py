"""Predictions of the exact cache, which an evaluation keeps for the next one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_eval import MODEL, SMALL, WORDS, refuse

from kvanta.cli import main
from kvanta.evaluate import Settings, evaluate, reference_store
from kvanta.evaluate.engine_factory import EngineFactory
from kvanta.evaluate.passages import Passage


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_reference_is_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = evaluate(MODEL, SMALL)
    (folder,) = (home / "eval").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["codes.u16", "header.json", "rows.bin"]
    assert (folder / "codes.u16").stat().st_size == 4 * 64 * 512 * 2
    with monkeypatch.context() as patch:
        patch.setattr(EngineFactory, "reference_engine", refuse)
        assert evaluate(MODEL, SMALL) == first
        with pytest.raises(AssertionError, match="again"):
            evaluate(MODEL, Settings(**{**vars(SMALL), "tokens": 384}))
    header = (folder / "header.json").read_text()
    codes = (folder / "codes.u16").read_bytes()
    damages = {
        "codes.u16": [codes[:-2], codes[:1000] + b"\xff" + codes[1001:], b""],
        "rows.bin": [b"", (folder / "rows.bin").read_bytes()[:-4] + b"abcd"],
        "header.json": [b"", b"[]", b'{"layout": 1}', header.replace("[[", "[[[", 1).encode()],
    }
    for name, contents in damages.items():
        for content in contents:
            (folder / name).write_bytes(content)
            assert evaluate(MODEL, SMALL) == first
            assert (folder / "codes.u16").read_bytes() == codes
    (folder / "codes.u16").unlink()
    assert evaluate(MODEL, SMALL) == first


def test_old_references_make_room(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, tokens in enumerate((128, 256, 384)):
        evaluate(MODEL, Settings(**{**vars(SMALL), "tokens": tokens, "formats": ["int8"]}))
        for path in (home / "eval").iterdir():
            os.utime(path, (path.stat().st_mtime - 100, path.stat().st_mtime - 100 + age))
    assert len(list((home / "eval").iterdir())) == 3
    for name, age in ((".killed", 2 * 86400), (".working", 60)):
        (home / "eval" / name).mkdir()
        os.utime(home / "eval" / name, (time.time() - age, time.time() - age))
    monkeypatch.setattr(
        reference_store, "MAX_BYTES", 640_000
    )  # 512 tokens take 262144, 384 take 196608, 256 take 131072
    evaluate(MODEL, SMALL)
    assert [path.name for path in (home / "eval").glob(".*")] == [".working"]
    sizes = sorted(path.stat().st_size for path in (home / "eval").glob("*/codes.u16"))
    assert sizes == [131072, 196608, 262144]


_SAVES = """
import sys
import numpy as np
from kvanta.evaluate import reference_store
from kvanta.evaluate.passages import Passage
from kvanta.evaluate.row_metrics import ReferenceRows
row = ReferenceRows(*(np.zeros((1, 8) if index == 0 else 1, kind) for index, kind in enumerate("Hfif")))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(100):
    reference_store.save("key", [Passage((1, 2, 3), 1)], 8, [row])
"""


def test_processes_save_the_same_reference_at_once(home: Path) -> None:
    words = [sys.executable, "-c", _SAVES]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running: list[Any] = [subprocess.Popen(words, **pipes) for _ in range(2)]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    found = reference_store.load("key", [Passage((1, 2, 3), 1)], 8)
    assert found is not None
    assert len(found[1]) == 1
    assert [path.name for path in (home / "eval").iterdir()] == ["key"]


def test_a_home_that_cannot_be_written(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.write_text("a file")
    assert main([*WORDS, "--formats", "int8"]) == 1
    assert "cannot be kept" in capsys.readouterr().err
