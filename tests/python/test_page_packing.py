"""benchmarks/page_packing.py on the shipped model."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "page_packing.py"


def test_floating_point_pages_can_be_packed(tmp_path: Path) -> None:
    text, file = tmp_path / "text", tmp_path / "report.json"
    text.write_text("Once upon a time there was a little girl. She had a red ball. " * 30)
    words = ["--text", str(text), "--tokens", "257", "--seconds", "0", "--formats", "bf16", "int8", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "stories260k", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["format"]: row for row in json.loads(file.read_text())["rows"]}
    assert 0.5 < rows["bf16"]["halves"]["left"] < rows["int8"]["zstd"]["1"]["left"] <= 1.01
    assert rows["bf16"]["entropy"] < 1
    assert rows["int8"]["zstd"]["1"]["unpack_gb_s"] > 0
