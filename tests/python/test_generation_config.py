"""Defaults of requests from generation_config.json: in LLM, in the server, overridden, and left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from live_server import error_of, live_server

from kvanta import LLM, InputError, SamplingParams
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.cli import main

SIZES: dict[str, Any] = {"kv_cache_memory_bytes": "8MiB", "threads": 1, "max_num_seqs": 4}
FILE = {"eos_token_id": 2, "do_sample": True, "temperature": 1e-6, "top_k": 7, "top_p": 0.5, "min_p": 0.25}
FILE |= {"repetition_penalty": 1.5, "max_new_tokens": 5}


def model(folder: Path, content: Any) -> Path:
    shutil.copytree(SHIPPED / "stories260k", folder)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("models") / "m", FILE)


def defaults(model: Path, **options: Any) -> dict[str, Any]:
    return LLM(model, **SIZES, **options).default_sampling


def test_llm_takes_them_for_calls_without_parameters(folder: Path) -> None:
    llm = LLM(folder, **SIZES)
    params = llm.get_default_sampling_params()
    expected = SamplingParams(temperature=1e-6, top_k=7, top_p=0.5, min_p=0.25, repetition_penalty=1.5, max_tokens=5)
    assert params == expected
    greedy = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=5)
    (one, other) = llm.generate("Once", greedy), llm.generate("Once")
    assert other[0].outputs[0].token_ids == one[0].outputs[0].token_ids
    assert len(other[0].outputs[0].token_ids) == 5
    assert next(reversed(list(llm.stream("Once"))))[1].outputs[0].token_ids == one[0].outputs[0].token_ids
    assert len(llm.generate("Once", SamplingParams(max_tokens=9))[0].outputs[0].token_ids) == 9


@pytest.mark.parametrize("source", ["kvanta", "vllm", "none"])
def test_none_are_taken(folder: Path, source: str) -> None:
    assert defaults(folder, generation_config=source) == {}
    override = '{"top_k": 3, "temperature": null}'
    assert defaults(folder, generation_config=source, override_generation_config=override) == {"top_k": 3}


def test_an_override_and_another_folder(folder: Path) -> None:
    given = defaults(folder, override_generation_config={"temperature": 0.5, "max_new_tokens": None})
    assert given == {"temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5}
    plain = SHIPPED / "stories260k"
    assert defaults(plain) == {}
    for source in (folder, folder / "generation_config.json"):
        assert defaults(plain, generation_config=str(source))["top_k"] == 7


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ({"top_p": 7}, {}, r"generation_config\.json: top_p must be .*, got 7; --generation-config kvanta takes no"),
        ("[]", {}, r"generation_config\.json must hold an object, got \[\]"),
        ({}, {"generation_config": "nowhere"}, "generation_config is 'nowhere', where there is no generation_config"),
        ({}, {"override_generation_config": "{"}, "override_generation_config: '{' is not JSON"),
        ({}, {"override_generation_config": "[1]"}, "override_generation_config: .* is not an object"),
        (
            {},
            {"override_generation_config": {"num_beams": 4}},
            "override_generation_config has 'num_beams'; known: temp",
        ),
        ({}, {"override_generation_config": {"min_p": 2}}, "min_p must be"),
    ],
)
def test_bad_ones_are_errors(tmp_path: Path, content: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        defaults(model(tmp_path / "m", content), **options)


def test_a_request_gets_what_it_does_not_say(folder: Path) -> None:
    with live_server(model=str(folder)) as server:
        greedy = {"prompt": "Once", "temperature": 0, "repetition_penalty": 1.5, "top_k": 0, "top_p": 1, "min_p": 0}
        expected = server.completion(**greedy, max_tokens=5)
        silent = server.completion(prompt="Once", top_p=None)
        assert silent["choices"] == expected["choices"]
        assert silent["usage"]["completion_tokens"] == 5
        assert server.completion(prompt="Once", max_tokens=3)["usage"]["completion_tokens"] == 3
        plain = server.completion(**{**greedy, "repetition_penalty": 1}, max_tokens=30)
        assert plain["choices"] != server.completion(prompt="Once", max_tokens=30)["choices"]
        chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}]).json()
        assert chat["usage"]["completion_tokens"] <= 5
        assert error_of(server.post("/v1/completions", prompt="Once", min_tokens=6))["param"] == "min_tokens"


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """kvanta generate has its own defaults; the model's replace them on request."""
    words = ["generate", str(folder), "Once", "--raw", "--json", "-", "--threads", "1"]

    def tokens(*more: str) -> int:
        assert main([*words, *more]) == 0
        return int(json.loads(capsys.readouterr().out)["generated_tokens"])

    assert tokens("--generation-config", "auto") == 5
    assert tokens("--generation-config", "auto", "--max-tokens", "2") == 2
    assert tokens("--override-generation-config", '{"max_new_tokens": 3}') == 3
    assert tokens() > 5


def test_a_share_of_zero_without_sampling_is_left_out(tmp_path: Path) -> None:
    """As transformers writes it: `do_sample` is false, and nothing looks at top_p."""
    assert defaults(model(tmp_path / "m", {"do_sample": False, "top_p": 0, "temperature": 0})) == {"temperature": 0.0}
