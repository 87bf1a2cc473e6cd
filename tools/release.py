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
from pathlib import Path

from release_checks import ReleaseError, check, project_urls, sections, version_of

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = ("x86_64", "aarch64")
PLACEHOLDER = ".example"


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
