"""benchmarks/prefix_cache.py on the shipped model: both parts, a picture, and rows of an earlier run that stay."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "prefix_cache.py"


def test_parts_are_measured_one_by_one_into_one_file(tmp_path: Path) -> None:
    file, picture = tmp_path / "report.json", tmp_path / "picture.png"
    sizes = (
        "--prompt-tokens 320 --turns 2 --writing-turns 2 --writing-prompt-tokens 128 --writing-requests 2 "
        "--writing-output-tokens 64"
    )
    for words in ("--parts first-token --formats bf16 int8", "--parts writing --formats int8"):
        command = [sys.executable, str(SCRIPT), "stories260k", *sizes.split(), *words.split(), "--json", str(file)]
        done = subprocess.run([*command, "--plot", str(picture)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    rows = {row["format"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["int8"]["stored_mib"] < rows["bf16"]["stored_mib"]
    assert rows["int8"]["times"] == rows["int8"]["cold_s"] / rows["int8"]["warm_s"]
    assert rows["int8"]["prompt_share"] > 0 < rows["int8"]["decode_share"]
    assert "prompt_share" not in rows["bf16"]
    assert picture.read_bytes().startswith(b"\x89PNG")
