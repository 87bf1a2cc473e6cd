"""benchmarks/disk_trace.py on the shipped model: a small trace, whose hours share nothing, through a small disk."""

import json
import subprocess
import sys
from pathlib import Path

import disk_trace
from disk_trace import allocated_bytes, repeated_hour
from server_process import free_port

from kvanta.loadgen.traces import read_trace

SCRIPT = Path(disk_trace.__file__)


def _trace(folder: Path) -> Path:
    """An hour of ten sessions of four turns each: the common block, and one more of the session's own every turn."""
    rows = [
        {
            "timestamp": 1000 * (300 * turn + session),
            "input_length": 512 * (2 + turn),
            "output_length": 100,
            "hash_ids": [0, *(10 * session + 1 + turn for turn in range(turn + 1))],
        }
        for turn in range(4)
        for session in range(10)
    ]
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_hours_have_the_sessions_of_their_number_and_contents_of_their_own(tmp_path: Path) -> None:
    workload = repeated_hour(read_trace(_trace(tmp_path)), hours=6, share=3, minutes=6)
    times = [each.arrival_s for each in workload.requests]
    assert times == sorted(times)
    assert [each.index for each in workload.requests] == list(range(len(times)))
    by_hour = [
        [each for each in workload.requests if hour * 60 <= each.arrival_s < (hour + 1) * 60] for hour in range(6)
    ]
    assert sum(map(len, by_hour[:3])) == 40, "every session once in three hours"
    assert [len(each) for each in by_hour[3:]] == [len(each) for each in by_hour[:3]]
    blocks = [{block for each in hour for block in each.blocks} for hour in by_hour]
    assert blocks[0] & blocks[3] == {0}, "the common block alone"
    last = by_hour[3][-1]
    assert len(last.blocks) == 5, "the turns of a session stay together"


def test_bytes_of_files_are_those_of_their_blocks(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"1" * 5000)
    (tmp_path / "two").write_bytes(b"")
    assert allocated_bytes(tmp_path) == (8192, 2)


def test_a_trace_passes_through_a_small_disk(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    sizes = "--hours 3 --share 1 --minutes 0.05 --kv-cache-dir-bytes 256KiB --memory 1MiB --compared 5"
    command = [sys.executable, str(SCRIPT), "stories260k", str(_trace(tmp_path)), *sizes.split()]
    command += ["--port", str(free_port()), "--kv-cache-dir", str(tmp_path), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert file.is_file(), done.stdout + done.stderr
    report = json.loads(file.read_text())
    report["verdicts"].pop("memory flat")  # so soon after the start, it grows
    assert all(report["verdicts"].values()), report
    [row] = report["rows"]
    assert row["requests"] == 3 * 40
    assert 0 < row["most_mib"] <= row["limit_mib"]
    assert row["evictions"] > 0
