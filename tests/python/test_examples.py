"""The programs of examples/python, run on the included model."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples/python"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def program(name: str) -> Callable[..., None]:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their types up
    spec.loader.exec_module(module)
    main: Callable[..., None] = module.main
    return main


def test_every_program_has_a_test() -> None:
    names = {file.stem for file in FOLDER.glob("*.py")}
    assert names == {name.removeprefix("test_") for name in globals() if name.removeprefix("test_") in names}


def test_generate(capsys: pytest.CaptureFixture[str]) -> None:
    program("generate")("stories260k")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("'Once upon a time' -> ', there was a little girl named Lily.")
    assert lines[0].endswith("(length)")
    assert lines[-1] == "cache int8: 400 bytes per token"


def test_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    program("chat")("stories260k", str(template))
    text = capsys.readouterr().out
    assert text.count("> ") == 2
    assert "(0 of 46 prompt tokens from the cache)" in text
    assert "(64 of " in text  # the first turn's only full page


def test_structured_output(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")
    program("structured_output")("stories260k")
    assert capsys.readouterr().out.startswith("Animal(name=")


def test_compare_caches(capsys: pytest.CaptureFixture[str]) -> None:
    program("compare_caches")("stories260k", "bf16", "int8", "fp8_per_token_head")
    lines = capsys.readouterr().out.splitlines()
    bf16, int8, fp8 = (float(line.split("mean KL ")[1].split(",")[0]) for line in lines)
    assert bf16 == 0.0
    assert 0.0 < int8 < fp8 < 0.05


def test_openai_client(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    program("openai_client")("stories260k")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("stories260k: ', there was a little girl")
    assert lines[1].replace("|", "") == "stream: , a little girl named Lily went to the park with"
    assert lines[2].startswith("next token: [{")


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_snippets_of_documents(page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    text = (FOLDER.parents[1] / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = "\n".join(block for block in blocks if not re.match(r"(LLM|formats|attention)[.(]", block))
    assert "from kvanta import LLM" in code
    code = code.replace('"smollm2"', f'"stories260k", chat_template={str(template)!r}').replace('"int4"', '"int8"')
    code = code.replace("max_model_len=4096", "max_model_len=512")
    names: dict[str, object] = {}
    exec(code, names)
    assert "400.0" in capsys.readouterr().out.splitlines()[0]
    assert page == "README.md" or isinstance(names["answer"], str)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "t4"])
def test_same_bits(kv_cache_dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    program("same_bits")("stories260k", kv_cache_dtype)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all("5 of 5 answers have the same bits" in line for line in lines)
    assert "(0 cached tokens)" not in lines[1]
