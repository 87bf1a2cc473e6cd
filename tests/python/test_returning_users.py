"""benchmarks/returning_users.py on the shipped model: a cache that holds everybody computes only what is new."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "returning_users.py"


def test_a_smaller_cache_remembers_more(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    sizes = [
        "--memory",
        "700KiB",
        "--first-tokens",
        "256",
        "--turn-tokens",
        "32",
        "--output-tokens",
        "16",
        "--users",
        "4",
    ]
    words = [*sizes, "--formats", "bf16", "int8", "--json", str(file)]
    done = subprocess.run([sys.executable, SCRIPT, "stories260k", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["format"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["bf16"]["fitting_users"] < 4 == rows["int8"]["fitting_users"]
    # Two rounds of 4: 304 tokens, then 352. Of a history of 272 (320) tokens all but the answer's last, whose keys were
    # never computed, are in whole pages of 16: 256 (304).
    assert rows["int8"]["prompt_tokens"] == 4 * (304 + 352)
    assert rows["int8"]["cached_share"] * rows["int8"]["prompt_tokens"] == 4 * (256 + 304)
    assert rows["bf16"]["cached_share"] < rows["int8"]["cached_share"]
