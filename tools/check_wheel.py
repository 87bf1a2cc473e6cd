#!/usr/bin/env python3
"""Installs a wheel in a fresh environment, without a compiler or this repository, and serves a model from it.

Before that, the wheel must have the notice (licenses/) of every library that is bundled with it or compiled into it.

    tools/check_wheel.py WHEEL [MODEL]
    tools/check_wheel.py --notices WHEEL     the notices alone: of a wheel for another architecture

MODEL: smollm2 by default. Dependencies come from where pip takes them, as wheels, in the versions of
requirements/constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "What is the capital of France?"
# The same answer by the server with the CPU's instructions, and by the portable kernels: what CPUs without AVX2 run.
ISAS = ("auto", "portable")

# Notices by the bundled libraries' names, without their versions.
BUNDLED = {
    "libcrypto": "openssl",
    "libgloo": "gloo",
    "libhiredis": "hiredis",
    "libibverbs": "libibverbs",
    "libnl-3": "libnl",
    "libnl-route-3": "libnl",
    "libssl": "openssl",
}
# Notices of what is compiled in, and the Debian packages it comes from; None: nanobind is a Python package.
COMPILED_IN = {"fmt": "libfmt-dev", "nanobind": None, "nlohmann-json": "nlohmann-json3-dev", "xxhash": "libxxhash-dev"}


class WheelError(Exception):
    """The fault of a wheel, in one line."""


def check_notices(names: Sequence[str]) -> set[str]:
    """The bundled libraries of a wheel whose files are `names`. Raises WheelError for one without a notice."""
    notices = {Path(name).stem for name in names if re.search(r"\.dist-info/licenses/licenses/[^/]+\.txt$", name)}
    files = [Path(name).name for name in names if re.search(r"^kvanta\.libs/.+\.so", name)]
    bundled = {re.sub(r"(-[0-9a-f]{8})?\.so.*$", "", file) for file in files}
    for library in sorted(bundled):
        if library not in BUNDLED:
            raise WheelError(f"the bundled library {library} has no notice; known: {', '.join(BUNDLED)}")
    for notice in sorted({*COMPILED_IN, *(BUNDLED[library] for library in bundled)}):
        if notice not in notices:
            raise WheelError(f"the wheel lacks the notice licenses/{notice}.txt")
    return bundled


def install(wheel: Path, folder: Path) -> Path:
    """The folder of the environment's programs. Nothing is compiled: pip takes wheels alone."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    programs = folder / "bin"
    pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    constraints = ["--constraint", str(ROOT / "requirements" / "constraints.txt")]
    subprocess.run([*pip, "--only-binary=:all:", *constraints, f"{wheel.resolve()}[serve]"], check=True)
    return programs


def environment(programs: Path) -> dict[str, str]:
    """Only the environment's own programs are on the PATH, and no folder of modules is given."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "CC", "CXX")
    return {**{name: value for name, value in os.environ.items() if name not in dropped}, "PATH": str(programs)}


def ask(url: str) -> str:
    """The answer to the question."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def serve_and_ask(programs: Path, folder: Path, model: str, isa: str) -> str:
    """The answer of a server, which must stop cleanly afterwards."""
    command = [str(programs / "kvanta"), "serve", model, "--port", "0", "--isa", isa, "--max-model-len", "1024"]
    with subprocess.Popen(command, cwd=folder, env=environment(programs), stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = []
        try:
            for line in server.stderr:
                lines.append(line)
                listening = re.search(r"serving .* on (http://\S+?),", line)
                if listening:
                    text = ask(listening[1])
                    break
            else:
                raise WheelError(f"kvanta serve {model} has ended: {''.join(lines).strip()}")
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                status = server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                raise WheelError("kvanta serve has not stopped 60 s after SIGTERM") from None
        if status != 0:
            raise WheelError(f"kvanta serve has stopped with status {status}")
        return text


def main() -> int:
    """Prints what has been checked; exit status 1: it does not work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--notices", action="store_true")
    arguments = parser.parse_args()
    with zipfile.ZipFile(arguments.wheel) as archive:
        bundled = check_notices(archive.namelist())
    print(f"notices of {', '.join(sorted(bundled))} and of what is compiled in")
    if arguments.notices:
        return 0
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvanta-wheel-") as name:
        folder = Path(name)
        programs = install(arguments.wheel, folder / "venv")
        print(f"installed {arguments.wheel.name} in {time.perf_counter() - begin:.0f} s")
        answers = {isa: serve_and_ask(programs, folder, arguments.model, isa) for isa in ISAS}
    for isa, answer in answers.items():
        print(f"{isa}: {answer!r}")
    if any("Paris" not in answer for answer in answers.values()):
        raise WheelError(f"an answer to {QUESTION!r} does not name Paris: {answers}")
    print(f"summary: {arguments.wheel.name} installs without a compiler and serves {arguments.model}")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (WheelError, subprocess.SubprocessError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
