"""Options of loading: what is honoured, and what is refused with the reason; a file of options; spellings of flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from kvanta import LLM, InputError
from kvanta.checkpoint.resolve import SHIPPED, HubAccess, resolve_model
from kvanta.cli import bench_linear, bench_serve, generate, plan, serve
from kvanta.cli import eval as eval_command
from kvanta.cli.arguments import engine_arguments, model_of
from kvanta.options.engine import EngineOptions
from kvanta.options.foreign import known_arguments
from kvanta.options.option import flag_of

SIZES: dict[str, Any] = {"kv_cache_memory_bytes": "8MiB", "threads": 1}
STORIES = SHIPPED / "stories260k"


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of the hub's client, which gives stories260k."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **arguments: Any) -> str:
        calls.append({"name": name, **arguments})
        return str(STORIES)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_revision_is_downloaded(downloads: list[dict[str, Any]]) -> None:
    LLM("org/model", revision="v2", hf_token="secret", download_dir="here", **SIZES)
    (call,) = downloads
    assert (call["name"], call["revision"], call["token"], call["cache_dir"]) == ("org/model", "v2", "secret", "here")
    LLM("org/model", tokenizer="org/other", tokenizer_revision="v3", **SIZES)
    assert [(each["name"], each["revision"]) for each in downloads[1:]] == [("org/model", None), ("org/other", "v3")]
    LLM("org/model", revision="v2", tokenizer_revision="v2", **SIZES)
    assert len(downloads) == 4


def test_a_revision_of_what_is_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the revision 'v2' is given for .*stories260k', which is on this machine"):
        LLM("stories260k", revision="v2", **SIZES)
    with pytest.raises(InputError, match="the revision 'v3'"):
        LLM("stories260k", tokenizer_revision="v3", **SIZES)
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert resolve_model(snapshot, HubAccess("abc")).path == snapshot
    with pytest.raises(InputError, match="only a hub id"):
        resolve_model(snapshot, HubAccess("abd"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_format": "dummy"}, "load_format: 'dummy' is not supported: weights are never made up"),
        ({"load_format": "pt"}, "load_format: 'pt' is not supported: only .* may run code"),
        ({"load_format": "sharded_state"}, "load_format: 'sharded_state' is not supported"),
        ({"load_format": "gguf"}, "load_format is gguf, and stories260k is safetensors"),
        ({"tokenizer_mode": "slow"}, "tokenizer_mode: 'slow' is not supported"),
        ({"tokenizer_mode": "mistral"}, "tokenizer_mode: 'mistral' is not supported"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend: 'outlines' is not supported: .*llguidance"),
        ({"grammar_backend": "xgrammar"}, "guided_decoding_backend: 'xgrammar' is not supported"),
        ({"structured_outputs_config": {"backend": "xgrammar"}}, "structured_outputs_config: backend 'xgrammar'"),
        ({"structured_outputs_config": {"enable_in_reasoning": True}}, "enable_in_reasoning is not supported"),
        ({"structured_outputs_config": {"reasoning_parser": "qwen3"}}, "give reasoning_parser as a separate option"),
        ({"structured_outputs_config": {"disable_any_whitespace": "x"}}, "disable_any_whitespace must be True or"),
        ({"structured_outputs_config": {"speed": 1}}, "structured_outputs_config has 'speed'; known: backend"),
        ({"structured_outputs_config": "{"}, "structured_outputs_config: '{' is not JSON"),
        ({"sampling_defaults": "openai"}, "sampling_defaults is not supported, got 'openai': give --generation-config"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LLM("stories260k", **options, **SIZES)


@pytest.mark.parametrize(
    "options",
    [
        {"load_format": "safetensors", "tokenizer_mode": "hf", "grammar_backend": "llguidance"},
        {"load_format": "auto", "tokenizer_mode": "auto", "guided_decoding_backend": "auto"},
        {"structured_outputs_config": '{"backend": "guidance", "reasoning_parser": "", "enable_in_reasoning": false}'},
        {"sampling_defaults": "model", "logprobs_mode": "raw_logprobs", "config_format": "hf"},
    ],
)
def test_what_means_the_same_is_accepted(options: dict[str, Any]) -> None:
    assert LLM("stories260k", **options, **SIZES).default_sampling == {}


def test_variables_of_the_template() -> None:
    template = "{{ tone }} {{ messages[0].content }}"
    llm = LLM("stories260k", chat_template=template, default_chat_template_kwargs='{"tone": "calm"}', **SIZES)
    chat = [{"role": "user", "content": "Hi"}]
    assert llm.chat_prompt(chat).text == "calm Hi"
    assert llm.chat_prompt(chat, chat_template_kwargs={"tone": "loud"}).text == "loud Hi"


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"dtype": "half"}, "dtype", "float16"),
        ({"dtype": "float"}, "dtype", "float32"),
        ({"max_model_len": "32k"}, "max_model_len", 32000),
        ({"max_model_len": "32K"}, "max_model_len", 32768),
        ({"max_model_len": "25.6k"}, "max_model_len", 25600),
        ({"max_model_len": "auto"}, "max_model_len", 0),
        ({"max_model_len": -1}, "max_model_len", 0),
        ({"max_num_batched_tokens": "2k"}, "max_num_batched_tokens", 2000),
    ],
)
def test_values_of_vllm(given: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(EngineOptions.read(given), name) == value


def words(*given: str) -> Any:
    return serve.parser().parse_exactly(["stories260k", *given])


def test_spellings_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    values = words("--max_model_len=64", "--no-enforce-eager", "--kv_cache_dtype", "int8", "--no-disable-radix-cache")
    assert engine_arguments(values) == {
        "max_model_len": "64",
        "enforce_eager": False,
        "kv_cache_dtype": "int8",
        "enable_prefix_caching": True,
    }
    dotted = words("--structured-outputs-config.backend", "guidance", "--override-generation-config.top_k=4")
    assert json.loads(dotted.structured_outputs_config) == {"backend": "guidance"}
    assert json.loads(dotted.override_generation_config) == {"top_k": 4}
    words("-dp", "2", "--cudagraph-capture-sizes", "1", "2", "--compilation-config.pass.fuse", "true", "-q", "none")
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in said] == [
        "data_parallel_size",
        "cudagraph_capture_sizes",
        "compilation_config",
    ]
    with pytest.raises(InputError, match="quantization is not supported, got 'awq'"):
        words("-q", "awq")


def test_a_file_of_options(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    content: dict[str, Any] = {
        "model": "stories260k",
        "port": 9,
        "max-model-len": "4k",
        "api_key": ["a", "b"],
        "enforce-eager": True,
        "enable_prefix_caching": False,
        "calculate_kv_scales": False,
        "override-generation-config": {"top_k": 3},
        "hf_token": None,
    }
    file.write_text(json.dumps(content))
    values = serve.parser().parse_exactly(["--config", str(file), "--port=10"])
    assert model_of(values) == "stories260k"
    assert (values.port, values.api_key, values.max_model_len) == ("10", ["a", "b"], "4k")
    assert (values.enforce_eager, values.enable_prefix_caching, values.hf_token) == (True, False, None)
    assert json.loads(values.override_generation_config) == {"top_k": 3}
    assert model_of(serve.parser().parse_exactly(["smollm2", "--config", str(file)])) == "smollm2"

    yaml = pytest.importorskip("yaml")
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(content))
    assert serve.parser().parse_exactly([f"--config={tmp_path / 'options.yaml'}"]).port == "9"
    for text, message in (
        ("[1]", "must hold options by name"),
        ("{", "--config"),
        ('{"prt": 1}', "unknown option prt"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            serve.parser().parse_exactly(["--config", str(file)])
    with pytest.raises(InputError, match="--config"):
        serve.parser().parse_exactly(["--config", str(tmp_path / "nowhere.yaml")])


def test_other_commands_accept_the_defaults_alone() -> None:
    parser = eval_command.parser()
    parser.parse_exactly(["stories260k", "--load-format", "auto", "--tokenizer-mode", "auto"])
    with pytest.raises(InputError, match="revision is an option of kvanta serve, kvanta generate, kvanta chat and LLM"):
        parser.parse_exactly(["stories260k", "--revision", "v2"])


@pytest.mark.parametrize(
    ("command", "given", "name", "values"),
    [
        (generate, ["--stop", "girl", "--stop", "a", "b"], "stop", ["girl", "a", "b"]),
        (serve, ["--api-key", "a", "--api-key", "b", "c"], "api_key", ["a", "b", "c"]),
        (plan, ["--formats", "int8", "--formats", "fp8"], "formats", ["int8", "fp8"]),
        (plan, ["--replicas", "2", "--replicas", "4"], "replicas", [2, 4]),
        (plan, [], "replicas", [1, 3, 10]),
        (eval_command, ["--tasks", "needle", "--tasks", "kl"], "tasks", ["needle", "kl"]),
        (bench_linear, ["--rows", "7", "--rows", "9"], "rows", [7, 9]),
        (bench_serve, ["--rate", "1", "2", "--rate", "4"], "rate", [1.0, 2.0, 4.0]),
    ],
)
def test_a_list_that_is_repeated_has_all_values(command: Any, given: list[str], name: str, values: Any) -> None:
    for _ in range(2):  # the default stays unchanged
        read = command.parser().parse_exactly(given)
        assert getattr(read, name) == values


def test_the_last_of_two_names_counts() -> None:
    assert engine_arguments(words("--max-model-len", "64", "--context-length", "32")) == {"max_model_len": "32"}
    assert engine_arguments(words("--context-length", "32", "--max-model-len", "64")) == {"max_model_len": "64"}


def test_words_after_two_dashes_are_arguments(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text('{"port": 3}')
    values = serve.parser().parse_exactly(["--config", str(file), "--", "--port"])
    assert (values.MODEL, values.port) == ("--port", "3")
    parser = generate.parser()
    assert parser.parse_exactly(["stories260k", "--", "--max_tokens"]).PROMPT == "--max_tokens"
    for extra in ("--max-tokens", "--such"):
        with pytest.raises(InputError, match=f"one argument too many: '{extra}'; words after -- are arguments"):
            parser.parse_exactly(["stories260k", "--", "--hello there", extra, "5"])
    with pytest.raises(InputError, match="unknown option --such"):
        parser.parse_exactly(["stories260k", "--such", "--", "--hello"])


@pytest.mark.parametrize("backend", ["local", "mp", "uni", None])
def test_ranks_are_processes_of_the_engine(backend: str | None) -> None:
    name = "distributed_executor_backend"
    assert known_arguments({name: backend}) == ({}, [])
    if backend is not None:
        assert model_of(serve.parser().parse_exactly([flag_of(name), backend, "stories260k"])) == "stories260k"
    for other in ("ray", "foo", "external_launcher"):
        with pytest.raises(InputError, match=f"{name} is not supported, got '{other}': .*local, mp, uni.*--replicas"):
            known_arguments({name: other})
        with pytest.raises(InputError, match=f"{name} is not supported, got '{other}'"):
            words(flag_of(name), other)
