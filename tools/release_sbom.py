"""The bill of materials of a release (CycloneDX, JSON): the package, the Python packages that it needs, the libraries
that its wheels bundle, and those that are compiled in.

Versions of Python packages are those of requirements/constraints.txt, with which the release was tested. Bundled
libraries are named by the SBOM that auditwheel puts into a wheel; for a wheel of another architecture, whose libraries
this machine's package manager does not know, by libraries.txt in its folder (scripts/cross --wheel). Libraries that are
compiled in have the versions of this machine's Debian packages: release where the wheels were built.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
import uuid
import zipfile
from collections.abc import Iterable
from datetime import UTC, datetime
from email.parser import HeaderParser
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from check_wheel import COMPILED_IN
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from release import ReleaseError, git, project_urls

SCHEMA = SchemaVersion.V1_6
REFERENCES = {
    "Homepage": ExternalReferenceType.WEBSITE,
    "Documentation": ExternalReferenceType.DOCUMENTATION,
    "Repository": ExternalReferenceType.VCS,
    "Issues": ExternalReferenceType.ISSUE_TRACKER,
    "Changelog": ExternalReferenceType.RELEASE_NOTES,
    "Security": ExternalReferenceType.SECURITY_CONTACT,
}


def pins(root: Path) -> dict[str, str]:
    """Versions by normalized name, from requirements/constraints.txt."""
    lines = (root / "requirements" / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


class PythonPackages:
    """The run-time dependencies of the package, direct ones and theirs, as components with a graph."""

    def __init__(self, bom: Bom, pinned: dict[str, str]) -> None:
        self._bom = bom
        self._pinned = pinned
        self._known: dict[str, tuple[Component, set[str]]] = {}

    def add(self, requirements: Iterable[str], extras: Iterable[str], scope: ComponentScope) -> list[Component]:
        """Components of those `requirements` (of METADATA) that hold on this machine with one of these extras."""
        components: dict[str, Component] = {}
        for line in requirements:
            requirement = Requirement(line)
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
                component = self._component(requirement, scope)
                components[component.name] = component
        return list(components.values())

    def _component(self, requirement: Requirement, scope: ComponentScope) -> Component:
        """Walks a package once for each set of extras; the first walk, of what is required, decides the scope."""
        name = canonicalize_name(requirement.name)
        component, done = self._known.get(name, (None, set()))
        if component is None:
            if name not in self._pinned:
                raise ReleaseError(f"{name} is needed at run time and not pinned in requirements/constraints.txt")
            purl = PackageURL("pypi", None, name, self._pinned[name])
            component = Component(name=name, version=self._pinned[name], purl=purl, bom_ref=str(purl), scope=scope)
            self._bom.components.add(component)
            self._known[name] = component, done
        extras = {"", *requirement.extras}
        if not extras <= done:
            done |= extras
            try:
                requirements = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                raise ReleaseError(
                    f"{name} is not installed here: its dependencies are read from its metadata"
                ) from None
            self._bom.register_dependency(component, self.add(requirements, extras, scope))
        return component


def bundled(wheel: Path) -> list[tuple[str, str, PackageURL]]:
    """Name, version and purl of every library in kvanta.libs/ of a wheel. Raises ReleaseError where one is unknown."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        boms = [
            json.loads(archive.read(name)) for name in names if name.endswith(".dist-info/sboms/auditwheel.cdx.json")
        ]
    files = [Path(name).name for name in names if re.match(r"kvanta\.libs/.+\.so", name)]
    if boms:
        parts = [part for bom in boms for part in bom["components"] if not part["purl"].startswith("pkg:pypi/")]
        found = [(part["name"], part["version"], PackageURL.from_string(part["purl"])) for part in parts]
    else:
        found = list(_listed(wheel.parent / "libraries.txt", files))
    if len(found) != len(files):
        raise ReleaseError(f"{wheel.name} bundles {', '.join(files)}; packages are known of {len(found)} of them")
    return found


def _listed(listing: Path, files: list[str]) -> Iterable[tuple[str, str, PackageURL]]:
    """The same from lines PACKAGE VERSION ARCHITECTURE FILE, by the files' names without auditwheel's hash."""
    rows = [line.split() for line in listing.read_text().splitlines()] if listing.exists() else []
    packages = {file: (package, version, architecture) for package, version, architecture, file in rows}
    for file in files:
        name = re.sub(r"-[0-9a-f]{8}(?=\.so)", "", file)
        if name in packages:
            package, version, architecture = packages[name]
            yield package, version, PackageURL("deb", "debian", package, version, {"arch": architecture})


def debian_version(package: str) -> str:
    """Version of an installed Debian package. Raises ReleaseError."""
    command = ["dpkg-query", "--show", "--showformat=${Version}", package]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode or not done.stdout:
        raise ReleaseError(f"{package} is compiled in, and dpkg-query knows no version of it here")
    return done.stdout


def compiled_in(pinned: dict[str, str]) -> list[Component]:
    """Libraries of headers, and nanobind, whose code is in the extension."""
    components = []
    for name, package in COMPILED_IN.items():
        if package:
            version = debian_version(package)
            purl = PackageURL("deb", "debian", package, version)
        else:
            version = pinned[name]
            purl = PackageURL("pypi", None, name, version)
        components.append(Component(name=name, version=version, purl=purl, bom_ref=f"{purl}#compiled-in"))
    return components


def _package(root: Path, version: str, files: list[Path]) -> Component:
    """The release itself, with the digests of its files."""
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    purl = PackageURL("pypi", None, "kvanta", version)
    references = [ExternalReference(type=REFERENCES[name], url=XsUri(url)) for name, url in project_urls(root).items()]
    for path in files:
        digest = HashType(alg=HashAlgorithm.SHA_256, content=sha256(path.read_bytes()).hexdigest())
        kind = ExternalReferenceType.DISTRIBUTION
        references.append(ExternalReference(type=kind, url=XsUri(path.name), hashes=[digest]))
    return Component(
        name="kvanta",
        version=version,
        type=ComponentType.APPLICATION,
        description=project["description"],
        licenses=[LicenseExpression(project["license"])],
        purl=purl,
        bom_ref=str(purl),
        external_references=references,
    )


def _requirements(wheel: Path) -> tuple[list[str], list[str]]:
    """Requires-Dist and Provides-Extra of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        header = HeaderParser().parsestr(archive.read(name).decode())
    return header.get_all("Requires-Dist", []), header.get_all("Provides-Extra", [])


def sbom(root: Path, version: str, files: list[Path]) -> str:
    """The JSON text, the same for the same commit and files. `files`: wheels and the archive of sources."""
    wheels = [path for path in files if path.suffix == ".whl"]
    pinned = pins(root)
    bom = Bom()
    package = bom.metadata.component = _package(root, version, files)
    python = PythonPackages(bom, pinned)
    requirements, extras = _requirements(wheels[0])
    needed = python.add(requirements, [""], ComponentScope.REQUIRED)
    needed += python.add(requirements, extras, ComponentScope.OPTIONAL)

    libraries: dict[str, Component] = {}
    for wheel in wheels:
        for name, library_version, purl in bundled(wheel):
            new = Component(name=name, version=library_version, purl=purl, bom_ref=str(purl))
            libraries.setdefault(str(purl), new).properties.add(Property(name="kvanta:wheel", value=wheel.name))
    for component in [*libraries.values(), *compiled_in(pinned)]:
        bom.components.add(component)
        needed.append(component)
    bom.register_dependency(package, needed)

    bom.metadata.timestamp = datetime.fromtimestamp(int(git(root, "log", "-1", "--format=%ct")), UTC)
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, f"{package.purl}#{git(root, 'rev-parse', 'HEAD')}")
    return make_outputter(bom, OutputFormat.JSON, SCHEMA).output_as_string(indent=2) + "\n"
