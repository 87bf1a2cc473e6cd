"""KvScheme as Python sees it, and the number of formats that documents give."""

import re
from pathlib import Path

from kvanta import _core


def test_exact_open_includes_schemes_that_read_two_pages_exactly() -> None:
    assert not _core.KvScheme.parse("int4+exact=none").exact_open
    assert _core.KvScheme.parse("int4+exact=open").exact_open
    assert _core.KvScheme.parse("int4+exact=2").exact_open


def test_the_readme_counts_the_formats() -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    found = re.search(r"any of (\d+) formats from 32 bits down to 2 \((\d+) of them\s+for MLA\)", readme)
    assert found is not None
    names = _core.format_names()
    assert (int(found[1]), int(found[2])) == (len(names), sum(name.startswith("mla_") for name in names))
