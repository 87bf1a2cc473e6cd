"""Every engine option and sampling field, declared once, exists in LLM, on the command line and over HTTP alike."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, error_of, live_server

from kvanta import LLM, InputError, SamplingParams, _core
from kvanta.cli import generate, serve
from kvanta.cli.arguments import CommandParser
from kvanta.engine.config import engine_config
from kvanta.options.engine import OPTIONS, EngineOptions
from kvanta.options.foreign import IGNORED, OPPOSITES, REFUSED, known_arguments
from kvanta.options.option import OptionGroup, flag_of, option
from kvanta.server import options as server_options
from kvanta.server.http.errors import in_json
from kvanta.server.requests.protocol import ChatRequest, CompletionRequest

FIELDS = dataclasses.fields(SamplingParams)
UNSUPPORTED = [field.name for field in FIELDS if field.metadata["refused"]]

# The public fields of vLLM 0.32's SamplingParams with their defaults; RequestOutputKind.CUMULATIVE is 0.
VLLM_SAMPLING: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "watermarking": None,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "prompt_logprob_token_ids": None,
    "prompt_logprob_start": None,
    "logprob_token_ids": None,
    "flat_logprobs": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": 0,
    "stream_interval": None,
    "skip_clone": False,
    "output_text_buffer_length": 0,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "bad_words": None,
    "skip_reading_prefix_cache": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "routed_experts_prompt_start": 0,
    "trace_decode_token_ids": None,
}
# Arguments of vLLM's LLM and EngineArgs, and of SGLang's ServerArgs, with values that have no effect.
NEUTRAL_ENGINE: dict[str, Any] = {
    "quantization": None,
    "quantization_config": None,
    "enable_lora": False,
    "lora_paths": None,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "trust_remote_code": True,
    "swap_space": 4,
    "cpu_offload_gb": 0,
    "gpu_memory_utilization": 0.92,
    "disable_log_stats": False,
    "disable_custom_all_reduce": False,
    "hf_overrides": {},
    "hf_token": None,
    "revision": None,
    "tokenizer_revision": None,
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "chat_template": None,
    "runner": "auto",
    "convert": "auto",
    "enable_prompt_embeds": False,
    "logits_processors": None,
    "structured_outputs_config": None,
    "compilation_config": None,
    "speculative_config": None,
    "generation_config": "auto",
    "override_generation_config": {},
    "disable_sliding_window": False,
    "max_logprobs": 20,
    "served_model_name": None,
    "json_model_override_args": "{}",
    "kv_cache_memory_bytes": None,
    "max_model_len": None,
    "enable_prefix_caching": None,
    "enforce_eager": False,
    "dtype": "auto",
    "seed": 0,
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


@functools.cache
def serve_parser() -> CommandParser:
    return serve.parser()


def flags(parser: CommandParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def test_every_engine_option_is_an_argument_a_flag_and_a_field_of_the_engine() -> None:
    signature = inspect.signature(LLM)
    config = _core.EngineConfig()
    for each in OPTIONS:
        assert signature.parameters[each.name].default == each.default
        assert hasattr(config, each.config_field or each.name), each.name
        for command in (generate, serve):
            assert {*each.flags} <= flags(command.parser()), each.name
        assert known_arguments({each.aliases[-1] if each.aliases else each.name: each.default}) == (
            {each.name: each.default},
            [],
        )


def test_defaults_of_the_engine_are_the_options_own() -> None:
    config, untouched = engine_config("folder", {}), _core.EngineConfig()
    for each in OPTIONS:
        name = each.config_field or each.name
        assert getattr(config, name) == getattr(untouched, name), name


def test_an_option_is_added_in_one_place() -> None:
    @dataclasses.dataclass
    class Extended(OptionGroup):
        swiftness: int = option(3, "how fast", int, aliases=("haste",), metavar="N", group="device")

    (added,) = Extended.options()
    assert added.flags == ["--swiftness", "--haste"]
    assert Extended.read({"swiftness": "7"}) == Extended(swiftness=7)
    assert Extended.read({}).swiftness == 3
    with pytest.raises(InputError, match="unknown engine option 'swiftness'"):
        LLM("stories260k", swiftness=3)


def test_every_server_option_is_a_flag() -> None:
    known = flags(serve.parser())
    for each in server_options.OPTIONS:
        assert {*each.flags} <= known


def test_every_sampling_field_is_an_http_field_and_an_attribute_of_the_engine() -> None:
    attributes = {name for name in dir(_core.SamplingParams) if not name.startswith("_")}
    engine = {name for name in attributes if not callable(getattr(_core.SamplingParams, name))}
    assert engine <= {field.name for field in FIELDS}
    for request in (CompletionRequest, ChatRequest):
        for field in FIELDS:
            if field.metadata["http"]:
                assert field.name in request.model_fields, field.name
    known = flags(generate.parser())
    assert {flag_of(field.name) for field in FIELDS if field.metadata["help"]} <= known


def test_the_defaults_of_vllm_are_accepted_and_are_ours(server: LiveServer) -> None:
    params = SamplingParams(**VLLM_SAMPLING)
    assert params == SamplingParams()
    for name, value in VLLM_SAMPLING.items():
        assert getattr(params, name) == value, name
    plain = server.post("/v1/completions", prompt="Once", temperature=0)
    body = {**VLLM_SAMPLING, "temperature": 0}
    given = server.post("/v1/completions", prompt="Once", **body)
    assert given.status_code == 200, given.text
    assert given.json()["choices"] == plain.json()["choices"]
    lists = server.post("/v1/completions", prompt="Once", stop=[], stop_token_ids=[], bad_words=[], length_penalty=1.0)
    assert lists.status_code == 200, lists.text


def make(name: str, value: Any) -> SamplingParams:
    given: dict[str, Any] = {name: value}
    return SamplingParams(**given)


class Kind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def test_an_output_kind_is_an_enum_of_vllm() -> None:
    for kind in Kind:
        assert SamplingParams(output_kind=kind).output_kind == kind.value
    with pytest.raises(InputError, match=r"output_kind must be a whole number in 0\.\.2, got 3"):
        SamplingParams(output_kind=3)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_honoured_is_refused_alike(server: LiveServer, name: str) -> None:
    values: list[Any] = [[3], 17, "x", getattr(SamplingParams(), name) is not True]
    for value in values:
        with pytest.raises(InputError, match=f"{name} is not supported, got ") as refused:
            make(name, value)
        response = server.post("/v1/completions", prompt="a", **{name: value})
        assert response.status_code == 400
        assert error_of(response)["message"] == in_json(str(refused.value))
        assert error_of(response)["param"] == name
    assert name not in repr(SamplingParams())


@pytest.mark.parametrize(("given", "param"), [({"temperature": -1.0}, "temperature"), ({"stop": [""]}, "stop")])
def test_a_value_out_of_range_is_refused_alike(server: LiveServer, given: dict[str, Any], param: str) -> None:
    with pytest.raises(InputError) as refused:
        SamplingParams(**given)
    error = error_of(server.post("/v1/completions", prompt="a", **given))
    assert (error["message"], error["param"]) == (in_json(str(refused.value)), param)


def test_engine_arguments_that_ask_for_nothing() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm = LLM("stories260k", **NEUTRAL_ENGINE)
    assert llm.config.max_model_len == 512
    lines = {str(warning.message).split()[0] for warning in caught}
    assert lines == {name for name, value in NEUTRAL_ENGINE.items() if name in IGNORED and value is not None}


def test_reasoning_is_separated_by_the_server_alone() -> None:
    with pytest.raises(InputError, match="reasoning_parser is not supported, got 'qwen3': kvanta serve separates"):
        LLM("stories260k", reasoning_parser="qwen3")
    assert serve.parser().parse_exactly(["stories260k", "--reasoning-parser", "qwen3"]).reasoning_parser == "qwen3"


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "reasoning_parser"])
def test_what_the_server_refuses_llm_refuses_as_well(name: str) -> None:
    with pytest.raises(InputError, match=f"^{name} is not supported, got 'some': ") as in_python:
        LLM("stories260k", **{name: "some"})
    parser = serve_parser()
    with pytest.raises(InputError) as on_command_line:
        parser.parse_exactly(["stories260k", flag_of(name), "some"])
    assert str(on_command_line.value) == str(in_python.value)
    neutrals: list[Any] = [None, False, "", [], {}]
    for neutral in neutrals:
        assert known_arguments({name: neutral}) == ({}, [])
    parser.parse_exactly(["stories260k", flag_of(name), "None"])
    parser.parse_exactly(["stories260k", flag_of(f"no_{name}")])


def test_every_compatible_name_is_a_flag_of_the_server_and_an_argument_of_llm() -> None:
    known = flags(serve.parser())
    for name in (*IGNORED, *REFUSED, *OPPOSITES):
        assert flag_of(name) in known, name
        known_arguments({name: None})
    assert not {*IGNORED, *REFUSED, *OPPOSITES} & {name for each in OPTIONS for name in each.names}
    assert EngineOptions().max_num_seqs == 64
