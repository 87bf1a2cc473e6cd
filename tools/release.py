#!/usr/bin/env python3
"""Checks that a release can be made, and puts its files together; scripts/release calls it.

    tools/release.py check
    tools/release.py assemble OUT FOLDER...   OUT: the files of FOLDER..., SBOM, notes and SHA256SUMS

A release needs a clean work tree, a section of CHANGELOG.md for the version of CMakeLists.txt, nothing under
Unreleased, and no tag of that version.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = ("x86_64", "aarch64")
PLACEHOLDER = ".example"


class ReleaseError(Exception):
    """What stops the release, in one line."""


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
        raise ReleaseError(f"the work tree has changes ({', '.join(changes.split()[1::2])}); commit or remove them")
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


def release_files(folders: list[Path], version: str) -> list[Path]:
    """Wheels and the archive of sources of `version` in `folders`. Raises ReleaseError for a lack of either, and for
    wheels that PyPI does not take.
    """
    found = [path for folder in folders for path in sorted(folder.glob("kvanta-*")) if path.is_file()]
    files = {path.name: path for path in found if path.name.endswith((".whl", ".tar.gz"))}
    places = ", ".join(map(str, folders))
    for name in files:
        if name != f"kvanta-{version}.tar.gz" and not name.startswith(f"kvanta-{version}-"):
            raise ReleaseError(f"{name} is not of version {version}; remove it")
        if name.endswith(".whl") and "manylinux" not in name:
            raise ReleaseError(
                f"{name} is for systems like the one that built it; auditwheel repair makes it manylinux"
            )
    if f"kvanta-{version}.tar.gz" not in files:
        raise ReleaseError(f"kvanta-{version}.tar.gz is not in {places}")
    if not any(name.endswith(".whl") for name in files):
        raise ReleaseError(f"there is no wheel of version {version} in {places}")
    return list(files.values())


def notes(root: Path, version: str, files: list[str]) -> str:
    """The text for the page of the release. Links into the repository become those of the version's tag."""
    repository = project_urls(root)["Repository"]
    text = re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({repository}/blob/v{version}/\1)", sections(root)[version])
    rows = "".join(f"- `{name}`\n" for name in files)
    return (
        f"# Kvanta {version}\n\n{text}\n\n## Files\n{rows}\n`sha256sum --check SHA256SUMS` verifies them, and "
        "`gh attestation verify FILE` that this repository's workflow made them.\n"
    )


def checksums(folder: Path) -> str:
    """Lines of sha256sum, of every file in `folder`."""
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items())


def assemble(root: Path, out: Path, folders: list[Path]) -> list[str]:
    """Fills `out`, which is emptied first. Gives the lines that summarize it."""
    from release_sbom import sbom

    version = version_of(root)
    files = release_files(folders, version)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for path in files:
        shutil.copy2(path, out)
    (out / f"kvanta-{version}.cdx.json").write_text(sbom(root, version, files))
    (out / "NOTES.md").write_text(notes(root, version, sorted(path.name for path in out.iterdir())))
    (out / "SHA256SUMS").write_text(checksums(out))
    lines = [f"summary: {out}: {', '.join(sorted(path.name for path in out.iterdir()))}"]
    made = [name for name in ARCHITECTURES if any(path.name.endswith(f"{name}.whl") for path in files)]
    lines += [f"warning: there is no wheel for {name}" for name in ARCHITECTURES if name not in made]
    if PLACEHOLDER in project_urls(root)["Repository"]:
        lines.append("warning: [project.urls] of pyproject.toml are placeholders: nothing may be published with them")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    assembling = commands.add_parser("assemble")
    assembling.add_argument("out", type=Path)
    assembling.add_argument("folders", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "check":
        print(f"summary: version {check(ROOT)} can be released")
    else:
        print("\n".join(assemble(ROOT, arguments.out, arguments.folders)))
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (ReleaseError, subprocess.CalledProcessError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
