"""scripts/release, on a repository and wheels that the test makes: what it refuses, and the files that it makes."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import release
import release_sbom
from cyclonedx.validation.json import JsonStrictValidator
from release_checks import ReleaseError, check, project_urls, sections, version_of

ROOT = Path(__file__).resolve().parents[2]
VERSION = "1.2.3"
CHANGELOG = f"# Changelog\n\n## [Unreleased]\n\n## [{VERSION}] - 2026-01-02\n\nFirst; see [formats](docs/formats.md).\n"
REQUIREMENTS = [
    "numpy>=1.26",
    "jinja2>=3.1",
    'uvicorn>=0.36; extra == "serve"',
    'no-such-package; python_version < "3"',
]
CONSTRAINTS = (
    "# Versions\nnumpy==2.4.6\nJinja2==3.1.6\nMarkupSafe==3.0.4\nnanobind==3.1.0\nuvicorn==0.54.0\nclick==8\nh11==1\n"
)
HIREDIS = "pkg:deb/debian/libhiredis0.14@0.14.1-3"


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@kvanta.example")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A clean work tree with what a release reads."""
    root = tmp_path / "repository"
    (root / "requirements").mkdir(parents=True)
    (root / "requirements" / "constraints.txt").write_text(CONSTRAINTS)
    (root / "CMakeLists.txt").write_text(f"project(kvanta VERSION {VERSION} LANGUAGES CXX)\n")
    (root / "CHANGELOG.md").write_text(CHANGELOG)
    shutil.copy(ROOT / "pyproject.toml", root)
    git(root, "init", "--quiet")
    commit(root)
    return root


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "a commit")


def make_wheel(folder: Path, platform: str = "manylinux_2_35_x86_64", version: str = VERSION) -> Path:
    """A wheel as auditwheel leaves it, with one bundled library."""
    folder.mkdir(exist_ok=True)
    wheel = folder / f"kvanta-{version}-cp311-cp311-{platform}.whl"
    extras = "Provides-Extra: serve\n"
    requires = "".join(f"Requires-Dist: {requirement}\n" for requirement in REQUIREMENTS)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("kvanta.libs/libhiredis-0123abcd.so.0.14", library(1))
        archive.writestr(
            f"kvanta-{version}.dist-info/METADATA", f"Name: kvanta\nVersion: {version}\n{requires}{extras}"
        )
    return wheel


def library(build: int) -> bytes:
    """As much of a shared library as is read: its build id."""
    return b"\x7fELF" + b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0" + bytes([build]) * 20


@pytest.fixture
def dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a wheel and the archive of sources; libhiredis0.14 and packages of headers are installed."""
    folder = tmp_path / "dist"
    make_wheel(folder)
    (folder / f"kvanta-{VERSION}.tar.gz").write_bytes(b"sources")
    installed = tmp_path / "libhiredis.so.0.14"
    installed.write_bytes(library(1))

    def dpkg_query(action: str, *arguments: str) -> str:
        if action == "--search":
            asked = {Path(path).name for path in arguments}
            return f"libhiredis0.14:amd64: {installed}\n" if installed.name in asked else ""
        package = arguments[-1]
        return "libhiredis0.14 0.14.1-3 amd64" if package.startswith("libhiredis0.14") else f"{package} 9 all"

    monkeypatch.setattr(release_sbom, "dpkg_query", dpkg_query)
    return folder


def test_a_release_can_be_made(repository: Path) -> None:
    assert check(repository) == VERSION


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a new file": (lambda root: (root / "new.txt").write_text("x"), r"the work tree has changes \(new.txt\)"),
    "a changed file": (lambda root: (root / "CMakeLists.txt").write_text("x"), r"changes \(CMakeLists.txt\)"),
    "a tag": (lambda root: git(root, "tag", f"v{VERSION}"), rf"the tag v{VERSION} exists; raise project"),
}


@pytest.mark.parametrize(("make", "reason"), FAULTS.values(), ids=FAULTS.keys())
def test_what_is_refused(repository: Path, make: Callable[[Path], object], reason: str) -> None:
    make(repository)
    with pytest.raises(ReleaseError, match=reason):
        check(repository)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            CHANGELOG.replace(VERSION, "1.2.2"),
            rf"no text for version {VERSION}, which CMakeLists.txt has; it has 1.2.2",
        ),
        (CHANGELOG.split("First", maxsplit=1)[0], f"no text for version {VERSION}"),
        (CHANGELOG.replace("ased]\n", "ased]\n- new\n"), rf"lines under Unreleased; move them to \[{VERSION}\]"),
    ],
    ids=["another version", "an empty section", "unreleased lines"],
)
def test_changelogs_that_are_refused(repository: Path, text: str, reason: str) -> None:
    (repository / "CHANGELOG.md").write_text(text)
    commit(repository)
    with pytest.raises(ReleaseError, match=reason):
        check(repository)


def test_files_of_a_release(repository: Path, dist: Path, tmp_path: Path) -> None:
    out = tmp_path / "release"
    out.mkdir()
    (out / "of-an-earlier-try").touch()
    lines = release.assemble(repository, out, [dist])
    wheel = f"kvanta-{VERSION}-cp311-cp311-manylinux_2_35_x86_64.whl"
    files = {"NOTES.md", "SHA256SUMS", f"kvanta-{VERSION}.cdx.json", f"kvanta-{VERSION}.tar.gz", wheel}
    assert {path.name for path in out.iterdir()} == files
    assert (out / wheel).read_bytes() == (dist / wheel).read_bytes()
    assert any("no wheel for aarch64" in line for line in lines)
    assert any("placeholders" in line for line in lines)

    lines = (out / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert sums == {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in files - {"SHA256SUMS"}}

    notes = (out / "NOTES.md").read_text()
    repository_url = project_urls(repository)["Repository"]
    assert f"First; see [formats]({repository_url}/blob/v{VERSION}/docs/formats.md)." in notes
    assert f"- `{wheel}`" in notes


def test_a_second_wheel_is_named(repository: Path, dist: Path, tmp_path: Path) -> None:
    arm = make_wheel(tmp_path / "arm", "manylinux_2_35_aarch64")
    (arm.parent / "libraries.txt").write_text("libhiredis0.14 0.14.1-3 arm64 libhiredis.so.0.14\n")
    lines = release.assemble(repository, tmp_path / "release", [dist, arm.parent])
    assert not any("no wheel" in line for line in lines)
    bom = json.loads((tmp_path / "release" / f"kvanta-{VERSION}.cdx.json").read_text())
    wheels = {part["purl"]: part["properties"][0]["value"] for part in bom["components"] if "properties" in part}
    assert wheels == {
        f"{HIREDIS}?arch=amd64": f"kvanta-{VERSION}-cp311-cp311-manylinux_2_35_x86_64.whl",
        f"{HIREDIS}?arch=arm64": arm.name,
    }


def test_the_bill_of_materials(repository: Path, dist: Path) -> None:
    files = sorted(dist.iterdir())
    text = release_sbom.sbom(repository, VERSION, files)
    assert JsonStrictValidator(release_sbom.SCHEMA).validate_str(text) is None
    assert release_sbom.sbom(repository, VERSION, files) == text, "the same commit gives the same text"
    bom = json.loads(text)

    package = bom["metadata"]["component"]
    assert (package["name"], package["version"]) == ("kvanta", VERSION)
    references = package["externalReferences"]
    digests = {entry["url"]: entry["hashes"][0]["content"] for entry in references if "hashes" in entry}
    assert digests == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert {entry["url"] for entry in references} >= set(project_urls(repository).values())

    python = {part["name"]: part.get("scope") for part in bom["components"] if part["bom-ref"].startswith("pkg:pypi")}
    assert python == {
        "numpy": "required",
        "jinja2": "required",
        "markupsafe": "required",
        "uvicorn": "optional",
        "click": "optional",
        "h11": "optional",
        "nanobind": None,
    }
    versions = {part["name"]: part["version"] for part in bom["components"]}
    assert versions["markupsafe"] == "3.0.4"
    assert (versions["libhiredis0.14"], versions["libfmt-dev"], versions["libxxhash-dev"]) == ("0.14.1-3", "9", "9")
    edges = {entry["ref"]: entry.get("dependsOn", []) for entry in bom["dependencies"]}
    assert edges["pkg:pypi/jinja2@3.1.6"] == ["pkg:pypi/markupsafe@3.0.4"]
    assert f"{HIREDIS}?arch=amd64" in edges[package["bom-ref"]]


def test_what_a_bill_of_materials_cannot_leave_out(repository: Path, dist: Path, tmp_path: Path) -> None:
    unknown = make_wheel(tmp_path / "unknown")
    (unknown.parent / "libraries.txt").write_text("libssl3 3.0 arm64 libssl.so.3\n")
    with pytest.raises(ReleaseError, match=r"bundles libhiredis.so.0.14, which no Debian package"):
        release_sbom.sbom(repository, VERSION, [unknown])
    (tmp_path / "libhiredis.so.0.14").write_bytes(library(2))  # a security update, after the wheel was built
    with pytest.raises(ReleaseError, match=r"libhiredis.so.0.14, .*in this build; release where the wheel was built"):
        release_sbom.sbom(repository, VERSION, [*dist.glob("*.whl")])
    (tmp_path / "libhiredis.so.0.14").write_bytes(library(1))
    (repository / "requirements" / "constraints.txt").write_text(CONSTRAINTS.replace("MarkupSafe", "Other"))
    with pytest.raises(ReleaseError, match=r"markupsafe is needed at run time and not pinned"):
        release_sbom.sbom(repository, VERSION, [*dist.glob("*.whl")])


@pytest.mark.parametrize(
    ("remove", "add", "reason"),
    [
        (".whl", None, f"no wheel of version {VERSION}"),
        (".tar.gz", None, rf"kvanta-{VERSION}.tar.gz is not in"),
        (".none", ("linux_x86_64", VERSION), "auditwheel repair makes it manylinux"),
        (".none", ("manylinux_2_35_x86_64", "1.2.2"), rf"is not of version {VERSION}; remove it"),
    ],
    ids=["no wheel", "no sources", "a wheel for this machine", "another version"],
)
def test_folders_that_are_refused(dist: Path, remove: str, add: tuple[str, str] | None, reason: str) -> None:
    for path in dist.iterdir():
        if path.name.endswith(remove):
            path.unlink()
    if add:
        make_wheel(dist, *add)
    with pytest.raises(ReleaseError, match=reason):
        release.release_files([dist], VERSION)


def test_this_changelog_has_this_version() -> None:
    text = sections(ROOT)[version_of(ROOT)]
    assert re.search(r"^### ", text, re.MULTILINE)
    assert len((ROOT / "CHANGELOG.md").read_text().split("\n## [0.1.0]")[1].splitlines()) < 80, "one page"
