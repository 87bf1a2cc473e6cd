"""Messages on memory, open files, CPUs and home folders that do not suffice."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import kvanta

from kvanta import LLM, InputError, ResourceError, cli
from kvanta.checkpoint.resolve import resolve_model
from kvanta.files.home_folder import kvanta_home
from kvanta.options.foreign import ignored_note
from kvanta.terminal.memory_limits import about_memory, memory_note

GIB = 1 << 30
MEMINFO = f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {4 << 20} kB\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """/proc of a machine of 16 GiB, of which 12 are in use, and of a process in the group /a/b of version 2."""
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(MEMINFO)
    (folder / "self/cgroup").write_text("0::/a/b\n")
    return folder


def group(folder: Path, **files: str) -> Path:
    """A control group with these files, whose names have _ for dots."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return folder


def test_the_machine_is_the_limit(proc: Path, tmp_path: Path) -> None:
    group(tmp_path / "cgroup/a/b", memory_max="max\n", memory_current=f"{3 * GIB}\n")
    expected = "; this machine has 16.0 GiB, of which 12.0 GiB are in use"
    assert memory_note(proc, tmp_path / "cgroup") == memory_note(proc, tmp_path / "none") == expected


def test_a_control_group_is_the_limit(proc: Path, tmp_path: Path) -> None:
    """The ancestor's limit leaves less than the group's own; inactive page cache is not in use."""
    root = tmp_path / "cgroup"
    group(root / "a/b", memory_max=f"{8 * GIB}", memory_current=f"{5 * GIB}", memory_stat=f"inactive_file {GIB}\n")
    assert str(root / "a/b/memory.max") not in memory_note(proc, root)  # 4 GiB are left, as on the machine
    group(root / "a", memory_max=f"{6 * GIB}", memory_current=f"{5 * GIB}", memory_stat=f"inactive_file {GIB}\n")
    expected = f"; the control group ({root}/a/memory.max) allows 6.0 GiB, of which 4.0 GiB are in use"
    assert memory_note(proc, root) == expected


def test_a_control_group_of_version_1(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("9:name=systemd:/\n4:memory,other:/jobs\n1:cpu:/\n")
    folder = group(tmp_path / "memory/jobs")
    (folder / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{3 * GIB // 2}\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_note(proc, tmp_path).endswith(
        "/jobs/memory.limit_in_bytes) allows 2.0 GiB, of which 1.5 GiB are in use"
    )


def test_ulimit_is_the_limit(proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (proc / "self/statm").write_text(f"{GIB // resource.getpagesize()} 1 1\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * GIB, 2 * GIB))
    assert memory_note(proc, tmp_path) == "; ulimit -v allows 2.0 GiB, of which 1.0 GiB are in use"


def test_errors_on_memory_name_the_limit() -> None:
    with pytest.raises(
        ResourceError, match=r"kv_cache_memory_bytes.*memory are available; .* GiB, of which .* are in use$"
    ):
        LLM("stories260k", kv_cache_memory_bytes="900TiB")
    with pytest.raises(ResourceError, match=r"^no port$"), about_memory():
        raise ResourceError("no port")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), "there is not enough memory; .* are in use"),
        (OSError(24, "Too many open files"), r"too many open files: the limit is \d+ \(ulimit -n\)"),
    ],
)
def test_commands_say_what_is_short(error: Exception, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> int:
        raise error

    command: Callable[[], int] = failing
    assert cli.report_errors(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "report it" not in line
    assert re.fullmatch(f"kvanta: error: {expected}", line)


def test_more_threads_than_cpus_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"threads is 500, and this process may use \d+ CPUs"):
        LLM("stories260k", threads=500, max_model_len=64)


def test_a_home_that_does_not_exist_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "nobody"
    monkeypatch.setenv("HOME", str(home))
    for name in ("KVANTA_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=f"the home folder '{home}' does not exist; set KVANTA_HOME to a folder"):
        kvanta_home()
    with pytest.raises(InputError, match="does not exist; set HF_HOME to a folder for downloads"):
        resolve_model("organization/model")
    assert not home.exists()
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "elsewhere"))
    assert kvanta_home() == tmp_path / "elsewhere"


def test_data_parallel_size_names_replicas() -> None:
    for name in ("data_parallel_size", "dp", "dp_size"):
        assert "--replicas" in ignored_note(name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens must be a whole number in "),
        (["--top-p", "7"], "--top-p must be a number in "),
        (["--dtype", "fp7"], "--dtype must be one of auto, "),
        (["--kv-cache-memory-bytes", "much"], "--kv-cache-memory-bytes: 'much' is not a size in bytes"),
    ],
)
def test_messages_of_commands_name_flags(words: list[str], message: str) -> None:
    done = kvanta("generate", "stories260k", "Once", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvanta: error: {message}")
