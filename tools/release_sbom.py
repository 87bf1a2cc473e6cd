"""The bill of materials of a release (CycloneDX, JSON): the package, the Python packages that it needs, the libraries
that its wheels bundle, and those that are compiled in.

Versions of Python packages are those of requirements/constraints.txt, with which the release was tested. Libraries have
those of this machine's Debian packages: release where the wheels were built. For a wheel of another architecture,
libraries.txt in its folder (from scripts/cross --wheel) has them. The SBOM that auditwheel puts into a wheel is not
used: it lacks libraries that Debian installs in /lib.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
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
from release_checks import ReleaseError, git, project_urls

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


def bundled(wheel: Path) -> list[Component]:
    """The Debian packages of every library in kvanta.libs/ of a wheel. Raises ReleaseError where one is unknown."""
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if re.match(r"kvanta\.libs/.+\.so", name)]
        # By their names without auditwheel's hash.
        libraries = {
            re.sub(r"-[0-9a-f]{8}(?=\.so)", "", Path(name).name): build_id(archive.read(name)) for name in files
        }
    listing = wheel.parent / "libraries.txt"
    packages = _listed(listing) if listing.exists() else _installed(libraries)
    unknown = [name for name in libraries if name not in packages]
    if unknown:
        raise ReleaseError(
            f"{wheel.name} bundles {', '.join(unknown)}, which no Debian package of this machine has in this build; "
            "release where the wheel was built"
        )
    return [debian_component(*packages[name]) for name in libraries]


def build_id(library: bytes) -> bytes:
    """The GNU build id of an ELF file, which auditwheel does not change. Empty if it has none."""
    note = re.search(rb"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0(.{20})", library, re.DOTALL)
    return note[1] if note else b""


def _listed(listing: Path) -> dict[str, tuple[str, str, str]]:
    """Package, version and architecture by file, from lines PACKAGE VERSION ARCHITECTURE FILE."""
    rows = [line.split() for line in listing.read_text().splitlines()]
    return {file: (package, version, architecture) for package, version, architecture, file in rows}


def _installed(libraries: dict[str, bytes]) -> dict[str, tuple[str, str, str]]:
    """The same of this machine's libraries that have these build ids."""
    folders = [f"{root}/lib/{part}" for root in ("", "/usr") for part in (sysconfig.get_config_var("MULTIARCH"), "")]
    paths = [str(Path(folder, name)) for folder in folders for name in libraries]
    found = [line.rsplit(": ", 1) for line in dpkg_query("--search", *paths).splitlines()]
    same = [(name, path) for name, path in found if build_id(Path(path).read_bytes()) == libraries[Path(path).name]]
    return {Path(path).name: _version(package) for package, path in same}


def _version(package: str) -> tuple[str, str, str]:
    text = dpkg_query("--show", "--showformat=${Package} ${Version} ${Architecture}", package)
    if not text:
        raise ReleaseError(f"{package} is part of the wheels, but dpkg-query finds no version of it on this machine")
    name, version, architecture = text.split()
    return name, version, architecture


def dpkg_query(*arguments: str) -> str:
    """The output of dpkg-query; empty where it finds nothing."""
    return subprocess.run(["dpkg-query", *arguments], check=False, capture_output=True, text=True).stdout


def debian_component(package: str, version: str, architecture: str) -> Component:
    """A component for a Debian package."""
    purl = PackageURL("deb", "debian", package, version, {"arch": architecture})
    return Component(name=package, version=version, purl=purl, bom_ref=str(purl))


def compiled_in(pinned: dict[str, str]) -> list[Component]:
    """Libraries of headers, and nanobind, whose code is in the extension."""
    components = [debian_component(*_version(package)) for package in COMPILED_IN.values() if package]
    for name in (name for name, package in COMPILED_IN.items() if not package):
        purl = PackageURL("pypi", None, name, pinned[name])
        components.append(Component(name=name, version=pinned[name], purl=purl, bom_ref=str(purl)))
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
        for library in bundled(wheel):
            known = libraries.setdefault(str(library.purl), library)
            known.properties.add(Property(name="kvanta:wheel", value=wheel.name))
    for component in [*libraries.values(), *compiled_in(pinned)]:
        bom.components.add(component)
        needed.append(component)
    bom.register_dependency(package, needed)

    bom.metadata.timestamp = datetime.fromtimestamp(int(git(root, "log", "-1", "--format=%ct")), UTC)
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, f"{package.purl}#{git(root, 'rev-parse', 'HEAD')}")
    return make_outputter(bom, OutputFormat.JSON, SCHEMA).output_as_string(indent=2) + "\n"
