"""Checks of the benchmarks that need no run: what they compare, and what they keep of an earlier report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import more_users
import pytest
import returning_users
from reports import earlier_rows
from server_process import descendants

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_a_thread_that_ends_meanwhile_has_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        read_text = Path.read_text

        def ends(path: Path, encoding: str | None = None) -> str:
            if f"/proc/{child.pid}/" in str(path):
                raise ProcessLookupError
            return read_text(path, encoding=encoding)

        monkeypatch.setattr(Path, "read_text", ends)
        try:
            assert child.pid in descendants(os.getpid())
        finally:
            child.kill()


def test_rows_of_other_settings_are_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps({"model": "a", "tokens": 5, "rows": [{"format": "int4"}]}))
    assert earlier_rows(file, {"model": "a", "tokens": 5}) == [{"format": "int4"}]
    assert earlier_rows(file, {"model": "b", "tokens": 5}) == []
    assert earlier_rows(file, {"model": "a"}) == []
    assert earlier_rows(tmp_path / "none.json", {}) == []


def test_users_must_get_the_same_tokens_in_all_runs() -> None:
    one = more_users.Trial(2, tokens={0: [1, 2, 3], 1: [4, 5]})
    more_users.check_tokens(one, more_users.Trial(3, tokens={0: [1, 2], 2: [9]}))  # preempted, and ended
    with pytest.raises(SystemExit, match="user 1 gets other tokens among 3 than among 2"):
        more_users.check_tokens(one, more_users.Trial(3, tokens={1: [4, 6]}))


def test_a_disk_must_not_change_histories() -> None:
    rows = [{"format": "bf16", "histories_sha256": "a"}, {"format": "int4", "histories_sha256": "b"}]
    returning_users.check_histories([*rows, rows[0]])
    with pytest.raises(SystemExit, match="int4 generates other tokens with a disk"):
        returning_users.check_histories([*rows, {"format": "int4", "histories_sha256": "c"}])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["biased_keys.py", "m", "--text", "t", "--formats", "int4+mean", "int4"], "needs int4 before int4+mean"),
        (["fleet_costs.py", "m", "--batch", "1", "--json", "f"], "--batch 1: the cost of a sequence in a step needs 2"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_measured(words: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / words[0], *words[1:]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert message in done.stderr
