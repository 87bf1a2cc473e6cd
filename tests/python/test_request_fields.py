"""Fields of vLLM's, SGLang's and OpenAI's requests: each is honoured, refused by name, or known to mean nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, error_of, live_server

from kvanta.server.protocol import ChatRequest, CompletionRequest
from kvanta.server.request_fields import IGNORED, READ, REFUSED

CHAT = [{"role": "user", "content": "Hi"}]
# Fields of ChatCompletionRequest and CompletionRequest in vLLM 0.33 and SGLang 0.5.23.
KNOWN = """
add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of bootstrap_host bootstrap_port
bootstrap_room cache_salt chat_template chat_template_kwargs continue_final_message custom_labels
custom_logit_processor custom_params data_parallel_rank documents ebnf ec_transfer_params echo extra_key
frequency_penalty ignore_eos images_config include_reasoning include_stop_str_in_output input_ids json_schema
kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs lora_path max_completion_tokens
max_dynamic_patch max_tokens media_io_kwargs messages min_dynamic_patch min_p min_tokens mm_payload
mm_processor_kwargs model n no_stop_trim parallel_tool_calls presence_penalty priority prompt prompt_embeds
prompt_logprobs reasoning_effort regex repetition_detection repetition_penalty request_id response_format
return_cached_tokens_details return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64
return_hidden_states return_input_ids_in_sglext return_meta_info return_mm_kwargs return_output_ids_in_sglext
return_prompt_text return_prompt_token_ids return_routed_experts return_sampling_mask return_spec_tokens_details
return_token_ids return_token_offsets return_tokens_as_token_ids return_weight_versions rid
routed_experts_prompt_start routed_experts_start_len sampling_logprobs_mode seed separate_reasoning session_id
session_params skip_special_tokens spaces_between_special_tokens stop stop_regex stop_token_ids stream
stream_interval stream_options stream_reasoning structured_outputs suffix task temperature thinking
thinking_token_budget tool_choice tools top_k top_logprobs top_p truncate_prompt_tokens truncation_side
use_audio_in_video use_beam_search user video_config vllm_xargs watermark watermarking
"""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


def test_every_field_is_known() -> None:
    declared = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    tables = [{*REFUSED} - {"reasoning_effort", "input_ids"}, {*IGNORED}, {*READ}, declared]
    assert {*KNOWN.split()} - set().union(*tables) == set()
    for index, table in enumerate(tables):
        assert not any(table & other for other in tables[index + 1 :])


@pytest.mark.parametrize("name", [*REFUSED, "thinking_token_budget", "logprob_token_ids"])
def test_what_cannot_be_honoured_is_refused(server: LiveServer, name: str) -> None:
    body: dict[str, Any] = {"max_tokens": 2, name: [17]}
    path = "/v1/completions"
    prompt: dict[str, Any] = {"prompt": "a"}
    if name == "input_ids":  # completions have it
        path, prompt = "/v1/chat/completions", {"messages": CHAT}
    response = server.post(path, **prompt, **body)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is not supported, got [17]: ")
    neutrals = REFUSED[name].neutral if name in REFUSED else ()
    for neutral in (None, *neutrals):
        assert server.post(path, **prompt, **{**body, name: neutral}).status_code == 200


def test_sglangs_names_for_what_is_here(server: LiveServer) -> None:
    tokens = server.post("/tokenize", prompt="Once upon").json()["tokens"]
    plain = server.completion(prompt="Once upon", temperature=0, max_tokens=8)
    for ids in (tokens, [tokens]):
        assert server.completion(input_ids=ids, temperature=0, max_tokens=8)["choices"] == plain["choices"]
    both = error_of(server.post("/v1/completions", prompt="a", input_ids=tokens))
    assert both["message"] == "give either prompt or input_ids, got both"
    assert "got nothing" in error_of(server.post("/v1/completions", max_tokens=1))["message"]

    body = {"prompt": "Once upon", "temperature": 0, "max_tokens": 40, "stop": "the"}
    trimmed, kept = (server.completion(**body, no_stop_trim=each)["choices"][0]["text"] for each in (False, True))
    assert kept == trimmed + "the"
    assert server.completion(**body, include_stop_str_in_output=True)["choices"][0]["text"] == kept
    assert server.post("/v1/completions", **body, no_stop_trim="yes").status_code == 400

    def cached(**fields: Any) -> int:
        usage = server.completion(prompt="Once upon a time " * 30, max_tokens=1, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(extra_key="k") == 0
    assert cached(extra_key="k") > 0
    assert cached(extra_key="other") == 0
    assert cached(extra_key="k", cache_salt="s") == 0


def test_modalities_of_texts(server: LiveServer) -> None:
    chat = {"messages": CHAT, "max_tokens": 2}
    assert server.post("/v1/chat/completions", **chat, modalities=["text"]).status_code == 200
    refused = error_of(server.post("/v1/chat/completions", **chat, modalities=["text", "audio"]))
    assert refused["param"] == "modalities"


@pytest.mark.parametrize(
    ("template", "effort", "prompt"),
    [
        ("{% set e = reasoning_effort | default('x') %}{{ e }}", "high", "high"),
        ("{% if enable_thinking is defined and not enable_thinking %}no{% else %}yes{% endif %}", "none", "no"),
        ("{% if thinking is defined and not thinking %}no{% else %}yes{% endif %}", "none", "no"),
        ("{% if enable_thinking is defined %}no{% else %}yes{% endif %}", "medium", "yes"),
        ("{% if enable_thinking is defined %}no{% else %}yes{% endif %}", "high", None),
        ("yes", "none", None),
    ],
)
def test_reasoning_effort_is_for_the_template(
    server: LiveServer, template: str, effort: str, prompt: str | None
) -> None:
    tokenizer = server.front.tokenizer
    kept = tokenizer.chat_template
    tokenizer.use_chat_template(template)
    try:
        response = server.post("/tokenize", messages=CHAT, reasoning_effort=effort)
        if prompt is not None:
            assert tokenizer.decode(response.json()["tokens"]) == prompt
        else:
            assert error_of(response)["param"] == "reasoning_effort"
            assert "chat template does not read it" in error_of(response)["message"]
    finally:
        tokenizer.chat_template = kept


def test_unknown_fields_are_logged_once(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvanta.server"):
        for _ in range(3):
            server.completion(prompt="a", max_tokens=1, colour_of_the_day="red", metadata={"a": "b"}, rid="1")
    assert [record.getMessage() for record in caplog.records] == [
        "a request has the field 'colour_of_the_day', which is unknown and ignored"
    ]
