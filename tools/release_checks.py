"""Checks before a release: what it needs of the work tree, the changelog and the tags. Standard library alone."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path


class ReleaseError(Exception):
    """The reason why there can be no release, in one line."""


def version_of(root: Path) -> str:
    """The one version number, from CMakeLists.txt."""
    found = re.search(r"project\(kvanta VERSION ([0-9.]+)", (root / "CMakeLists.txt").read_text())
    if not found:
        raise ReleaseError("CMakeLists.txt has no project(kvanta VERSION ...)")
    return found[1]


def sections(root: Path) -> dict[str, str]:
    """The texts of CHANGELOG.md by version; "Unreleased" is one."""
    parts = re.split(r"^## \[(.+?)\].*\n", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def project_urls(root: Path) -> dict[str, str]:
    """[project.urls] of pyproject.toml."""
    urls: dict[str, str] = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]
    return urls


def git(root: Path, *arguments: str) -> str:
    """The output of a git command."""
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def check(root: Path) -> str:
    """The version that can be released. Raises ReleaseError."""
    changes = git(root, "status", "--porcelain")
    if changes:
        files = ", ".join(line.split(maxsplit=1)[1] for line in changes.splitlines())
        raise ReleaseError(f"the work tree has changes ({files}); commit or remove them")
    version = version_of(root)
    texts = sections(root)
    if not texts.get(version):
        known = ", ".join(name for name in texts if name != "Unreleased") or "none"
        raise ReleaseError(f"CHANGELOG.md has no text for version {version}, which CMakeLists.txt has; it has {known}")
    if texts.get("Unreleased"):
        raise ReleaseError(f"CHANGELOG.md has lines under Unreleased; move them to [{version}]")
    if git(root, "tag", "--list", f"v{version}"):
        raise ReleaseError(f"the tag v{version} exists; raise project(kvanta VERSION {version}) in CMakeLists.txt")
    return version
