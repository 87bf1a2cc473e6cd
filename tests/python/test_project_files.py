"""Files for people and machines around the code: addresses, workflows, forms, the security policy, the container."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import check_wheel
import pytest
import yaml
from release_checks import project_urls
from test_release import make_wheel

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tracked_texts() -> dict[str, str]:
    """Texts of the repository's files outside the code."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = [name for name in listed.split("\0") if re.search(r"\.(md|ya?ml|toml|json|tpl|txt)$|^Containerfile$", name)]
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in names if (ROOT / name).is_file()}


def test_addresses_are_those_of_pyproject() -> None:
    """pyproject.toml is the one place for the project's addresses: every other mention is one of these."""
    urls = project_urls(ROOT)
    host = urlsplit(urls["Homepage"]).hostname
    found: dict[str, set[str]] = {}
    for name, text in tracked_texts().items():
        if name != "pyproject.toml":
            for url in re.findall(rf"https?://{host}[^\s)\]>\"'`]*", text):
                found.setdefault(url, set()).add(name)
    assert "SECURITY.md" in found[urls["Security"]]
    assert ".github/ISSUE_TEMPLATE/config.yml" in found[urls["Security"]]
    assert "Containerfile" in found[urls["Repository"]]
    unknown = {url: names for url, names in found.items() if url not in urls.values()}
    assert not unknown, f"addresses that are not in [project.urls]: {unknown}"


def test_workflows_pass_actionlint() -> None:
    program = Path(sys.executable).parent / "actionlint"
    done = subprocess.run([program, *WORKFLOWS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_trust_little(path: Path) -> None:
    """Actions are commits, not tags, which can be moved; only what a job's comment explains may be written."""
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    for line in re.findall(r"uses: (\S+.*)", text):
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+|\./\.github/workflows/\w+\.yml", line), line
    for line in re.findall(r"^.*: write.*$", text, re.MULTILINE):
        assert "#" in line or "attestations" in line, line
    for script in re.findall(r"run: (scripts/\w+)", text):
        assert os.access(ROOT / script, os.X_OK), script
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")


def test_forms_of_issues() -> None:
    """GitHub shows a form only with these keys, each question with a unique id."""
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert {form.stem for form in forms} == {"bug", "config", "feature"}
    for form in forms:
        content: dict[str, Any] = yaml.safe_load(form.read_text())
        if form.stem == "config":
            assert all({"name", "url", "about"} == set(link) for link in content["contact_links"])
            continue
        assert {"name", "description", "labels", "body"} == set(content)
        ids = [field["id"] for field in content["body"]]
        assert len(ids) == len(set(ids)) > 0
        for field in content["body"]:
            assert field["type"] in {"input", "textarea", "dropdown"}
            assert field["attributes"]["label"]


def test_the_security_policy_names_every_library_of_a_wheel() -> None:
    text = (ROOT / "SECURITY.md").read_text().lower()
    for library in {*check_wheel.BUNDLED.values(), *check_wheel.COMPILED_IN}:
        assert library in text, library


def instructions() -> list[tuple[str, str]]:
    """Containerfile by kind and text, with continued lines joined."""
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in joined.splitlines() if line.strip()]


def test_the_container_runs_as_a_user_on_a_pinned_image() -> None:
    made = instructions()
    kinds = [kind for kind, _ in made]
    values = dict(made)
    assert re.fullmatch(r"PYTHON_IMAGE=\S+/python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", values["ARG"])
    assert values["FROM"] == "${PYTHON_IMAGE}"
    assert kinds.index("USER") > max(at for at, kind in enumerate(kinds) if kind == "RUN"), "root only builds"
    user, group = values["USER"].split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert f'licenses="{PROJECT["license"]}"' in values["LABEL"]

    health = json.loads(values["HEALTHCHECK"].split("CMD", 1)[1])
    compile(health[2], "HEALTHCHECK", "exec")
    assert f"127.0.0.1:{values['EXPOSE']}/health" in health[2]
    assert json.loads(values["ENTRYPOINT"]) == ["kvanta", "serve", "--host", "0.0.0.0"]
    extras = re.search(r"\$wheel\[([\w,]+)\]", dict(reversed(made))["RUN"])
    assert extras
    assert set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])


def install(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the instruction that installs the wheel, on the wheels of `folder`: by this Python's pip, and no network."""
    command = next(value for kind, value in instructions() if kind == "RUN")
    command = re.sub(r"--mount=\S+ *", "", command).replace("/dist", str(folder))
    command = command.replace("--no-cache-dir --constraint /constraints.txt", "--dry-run --no-deps --no-index")
    programs = folder.parent / "programs"
    programs.mkdir()
    for name, module in {"pip": "-m pip", "python": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:/usr/bin:/bin"}
    return subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)


def wheel_for(folder: Path, tag: str) -> Path:
    machine = os.uname().machine
    made = make_wheel(folder, f"manylinux_2_17_{machine}")
    info = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\n"
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr("kvanta-1.2.3.dist-info/WHEEL", f"{info}Tag: {tag}-manylinux_2_17_{machine}\n")
        archive.writestr("kvanta-1.2.3.dist-info/RECORD", "")
    return made.rename(folder / f"kvanta-1.2.3-{tag}-manylinux_2_17_{machine}.whl")


def test_the_container_takes_a_wheel_for_its_python(tmp_path: Path) -> None:
    major, minor = sys.version_info[:2]
    wheel_for(tmp_path / "dist", f"cp{major}{minor}-cp{major}{minor}")
    done = install(tmp_path / "dist")
    assert done.returncode == 0, done.stderr


def test_the_container_says_that_a_wheel_is_for_another_python(tmp_path: Path) -> None:
    wheel = wheel_for(tmp_path / "dist", "cp399-abi3")
    done = install(tmp_path / "dist")
    assert done.returncode == 1
    assert f"error: {wheel.name} is not for Python 3." in done.stderr
    assert "--build-arg PYTHON_IMAGE=" in done.stderr


def test_the_container_says_that_there_is_no_wheel(tmp_path: Path) -> None:
    make_wheel(tmp_path / "dist", "manylinux_2_17_riscv64")
    done = install(tmp_path / "dist")
    assert done.returncode == 1
    assert re.search(r"^error: dist/ has no wheel for \w+; scripts/wheel makes one", done.stderr, re.MULTILINE)
