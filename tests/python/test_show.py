"""`kvanta show`: facts with their places, and problems in place of a first error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import TinyModel, write_gguf

from kvanta.checkpoint.resolve import SHIPPED
from kvanta.cli import main


def show(model: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """The exit status and the report."""
    status = main(["show", str(model), "--json", "-"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    report["facts"] = {fact["name"]: (fact["value"], fact["source"]) for fact in report["facts"]}
    return status, report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped model."""
    return Path(shutil.copytree(SHIPPED / "stories260k", tmp_path / "model"))


def change(file: Path, **values: object) -> None:
    """Sets keys of a JSON file."""
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**content, **values}))


def test_a_model_that_loads(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = show("stories260k", capsys)
    facts = report["facts"]
    assert (status, report["loads"], report["problems"]) == (0, True, [])
    assert facts["architecture"] == ("LlamaForCausalLM", "config.json architectures")
    assert facts["context"] == ("512 tokens", "config.json max_position_embeddings")
    assert facts["weights"] == ("F32 1015.8 KiB", "model.safetensors")
    assert facts["chat template"][0].startswith("none")
    assert report["bytes_per_token"]["bf16"] == 640
    assert any(entry["name"] == "cache formats" for entry in report["ignored"])


def test_places_are_those_that_decide(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder / "config.json", eos_token_id=2, text_config=None)
    change(folder / "generation_config.json", eos_token_id=[2, 5], temperature=0.5)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}{{ enable_thinking }}"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "preprocessor_config.json").write_text("{}")
    _, report = show(folder, capsys)
    facts = report["facts"]
    assert "(2)" in facts["end tokens"][0]
    assert "(5)" in facts["end tokens"][0]
    assert "generation_config.json" in facts["end tokens"][1]
    assert facts["sampling"] == ("temperature 0.5", "generation_config.json")
    about = f"{len(template)} characters, reads enable_thinking, tools"
    assert facts["chat template"] == (about, "chat_template.jinja")
    assert report["ignored"][0]["name"] == "preprocessor_config.json"


def test_a_declared_cache_is_never_passed_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = "hf_quant_config.json"
    for declaration, shown in (
        ({"kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": "INT8"}, "not known ("),
        (
            {
                "kv_cache_quant_algo": "MIXED_PRECISION",
                "kv_cache_quantized_layers": {"model.layers.1.self_attn": {"quant_algo": "FP8"}},
            },
            "fp8_e4m3 in 1 of 5 layers",
        ),
    ):
        (folder / place).write_text(json.dumps({"quantization": {"quant_algo": None, **declaration}}))
        _, report = show(folder, capsys)
        value, source = report["facts"]["KV cache"]
        assert value.startswith(shown)
        assert source == place


@pytest.mark.parametrize(
    ("name", "content", "problem", "kept"),
    [
        ("config.json", '{"architectures": ["FooForCausalLM"]}', "FooForCausalLM", "tokenizer"),
        ("config.json", "{", "config.json", "tokenizer"),
        ("tokenizer.json", "{}", "tokenizer", "architecture"),
        ("generation_config.json", '{"temperature": -1}', "temperature", "end tokens"),
        ("model.safetensors", "x" * 20, "model.safetensors", "end tokens"),
    ],
)
def test_every_problem_is_named_and_the_rest_is_shown(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, problem: str, kept: str
) -> None:
    (folder / name).write_text(content)
    status, report = show(folder, capsys)
    assert (status, report["loads"]) == (2, False)
    assert any(problem in each for each in report["problems"]), report["problems"]
    assert len(report["problems"]) == len(set(report["problems"]))
    assert kept in report["facts"]


def test_more_tokens_than_rows_are_a_problem_of_these_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 600, "content": "<far>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    status, report = show(folder, capsys)
    assert status == 0
    assert "tokens above 511" in report["problems"][0]


def test_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))
    file = tmp_path / "tiny.gguf"
    write_gguf(file, TinyModel(), TinyModel().weights())
    status, report = show(file, capsys)
    assert status == 0, report["problems"]
    assert report["facts"]["weights"][1] == "tiny.gguf"
    assert " x " in report["facts"]["weights"][0]


def test_the_page_fits_and_names_both_ends(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "generation_config.json").write_text('{"temperature": -1}')
    assert main(["show", str(folder)]) == 2
    page = capsys.readouterr().out
    assert "Would not work:" in page
    assert max(map(len, page.splitlines()[1:])) <= 120
    assert len(page.splitlines()) <= 40


def test_the_cache_is_what_the_engine_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of a model in float32 is fp32."""
    _, report = show(folder, capsys)
    assert report["facts"]["KV cache"][0].startswith("fp32, unless")
    assert list(report["bytes_per_token"])[:2] == ["fp32", "bf16"]


def test_a_folder_without_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors").unlink()
    status, report = show(folder, capsys)
    assert (status, report["problems"]) == (
        2,
        [f"{folder} has no weights: no *.safetensors; download them, or give a GGUF file"],
    )
    assert "tokenizer" in report["facts"]


@pytest.mark.parametrize(
    ("files", "problem", "facts"),
    [
        ((), "has no config.json", set()),
        (("tokenizer.json", "tokenizer_config.json"), "has no config.json", {"tokenizer", "end tokens"}),
        (("models--org--name/refs/main",), "is the hub's cache: give one of its models, such as", set()),
        (("part/config.json",), "or a .gguf file, such as ", set()),
    ],
    ids=["empty", "a tokenizer alone", "the hub's cache", "one level up"],
)
def test_a_folder_that_is_no_model_has_one_problem(
    files: tuple[str, ...],
    problem: str,
    facts: set[str],
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in files:
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        source = folder / Path(name).name
        (other / name).write_bytes(source.read_bytes() if source.is_file() else b"abc")
    status, report = show(other, capsys)
    assert status == 2
    assert len(report["problems"]) == 1
    assert problem in report["problems"][0]
    assert facts <= set(report["facts"])
    assert "sampling" not in report["facts"]


def test_a_long_list_of_alternatives_is_cut(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "nope"}}))
    assert main(["show", str(folder)]) == 2
    page = capsys.readouterr().out
    assert "... (--json - has all of it)" in page
    assert len(page.splitlines()) <= 60
