"""The site of the documents: it builds without a warning, and a broken link or anchor is found."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("material") is None,
    reason="mkdocs-material is missing: pip install -r requirements/docs.txt",
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the site is made of, and empty ones in place of those that its pages link to."""
    root = tmp_path_factory.mktemp("site")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if name.startswith(("docs/", "tools/site_hooks.py")) or "/" not in name:
            shutil.copy(ROOT / name, place)
        else:
            place.touch()
    return root


def build(root: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    return done.returncode, done.stdout + done.stderr


def test_the_site_builds_strictly(tree: Path) -> None:
    status, output = build(tree)
    assert status == 0, output
    index = (tree / "build/site/index.html").read_text()
    assert 'href="serve.html' in index
    assert 'src="results/formats.png"' in index


def test_a_broken_anchor_is_found(tree: Path) -> None:
    with (tree / "docs/chat.md").open("a") as page:
        page.write("\n[x](serve.md#nowhere)\n")
    status, output = build(tree)
    assert status == 1
    assert "does not contain an anchor '#nowhere'" in output


def test_a_broken_link_is_found() -> None:
    hooks = pytest.importorskip("site_hooks")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="chat.md"))
    with pytest.raises(hooks.PluginError, match=r"docs/chat.md: nix.md does not exist"):
        hooks.on_page_markdown("[x](nix.md)", page, SimpleNamespace(repo_url=""), {})
    assert hooks.on_page_markdown("    [x](nix.md)", page, SimpleNamespace(repo_url=""), {}) == "    [x](nix.md)"
