"""Calls of LLM as scripts made for vLLM have them: order and names of arguments, values without effect."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
from typing import Any

import pytest
from stories import GREEDY, PROMPT
from tqdm import tqdm

from kvanta import LLM, BeamSearchParams, InputError, SamplingParams
from kvanta.options.foreign import known_arguments

CHAT = [{"role": "user", "content": PROMPT}]
TEMPLATE = "{{ messages[0].content }}"
BEAMS = BeamSearchParams(beam_width=2, max_tokens=4)

# Arguments of the methods of vLLM's LLM, after self: those that may be given by position, and all.
METHODS: dict[str, tuple[list[str], set[str]]] = {
    "generate": (
        ["prompts", "sampling_params"],
        {"use_tqdm", "lora_request", "priority", "tokenization_kwargs"},
    ),
    "chat": (
        [
            "messages",
            "sampling_params",
            "use_tqdm",
            "lora_request",
            "chat_template",
            "chat_template_content_format",
            "add_generation_prompt",
            "continue_final_message",
            "tools",
            "chat_template_kwargs",
            "tokenization_kwargs",
            "mm_processor_kwargs",
        ],
        set(),
    ),
    "beam_search": (["prompts", "params", "lora_request", "use_tqdm", "concurrency_limit"], set()),
    "encode": (
        ["prompts", "pooling_params"],
        {"use_tqdm", "lora_request", "pooling_task", "tokenization_kwargs"},
    ),
    "embed": (["prompts"], {"use_tqdm", "pooling_params", "lora_request", "tokenization_kwargs"}),
}


@pytest.mark.parametrize("method", METHODS)
def test_the_arguments_of_vllm(method: str) -> None:
    by_position, by_name = METHODS[method]
    ours = list(inspect.signature(getattr(LLM, method)).parameters.values())[1:]
    positional = [each.name for each in ours if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional == by_position
    assert by_name <= {each.name for each in ours}


def test_chats_by_position(llm: LLM) -> None:
    by_name = llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    by_position = llm.chat(CHAT, GREEDY, False, None, TEMPLATE, "string", True, False, None, None, {}, {"crops": 4})
    (one,), (other,) = by_name, by_position
    assert one.prompt == other.prompt == PROMPT
    assert one.outputs == other.outputs
    with pytest.raises(InputError, match="chat_template_content_format must be auto or string, got 'openai'"):
        llm.chat(CHAT, GREEDY, chat_template=TEMPLATE, chat_template_content_format="openai")


def test_arguments_that_ask_for_what_is_not_supported(llm: LLM) -> None:
    wrong: dict[str, Any] = {"lora_request": "adapter", "tokenization_kwargs": {"truncate_prompt_tokens": 3}}
    for name, value in wrong.items():
        with pytest.raises(InputError, match=f"{name} is not supported, got .*{next(iter(value))}"):
            llm.generate(PROMPT, GREEDY, **{name: value})
        with pytest.raises(InputError, match=f"{name} is not supported"):
            llm.embed(PROMPT, **{name: value})
    assert llm.generate(PROMPT, GREEDY, lora_request=None, tokenization_kwargs={})
    assert known_arguments({"worker_cls": "auto"}) == ({}, [])
    with pytest.raises(InputError, match="worker_cls"):
        known_arguments({"worker_cls": "mine.Worker"})


def test_a_progress_bar_of_the_callers(llm: LLM) -> None:
    bars: list[Any] = []

    def bar(**arguments: Any) -> Any:
        bars.append(tqdm(**arguments, file=io.StringIO()))
        return bars[-1]

    llm.generate([PROMPT] * 3, GREEDY, use_tqdm=bar)
    llm.chat([CHAT], GREEDY, functools.partial(bar, leave=False), chat_template=TEMPLATE)
    llm.embed([PROMPT] * 2, use_tqdm=bar)
    assert [(each.n, each.total) for each in bars] == [(3, 3), (1, 1), (2, 2)]


def test_beams_of_some_prompts_at_a_time(llm: LLM) -> None:
    prompts = [PROMPT, "The dog", "A cat"]
    together = llm.beam_search(prompts, BEAMS, None, False)
    assert llm.beam_search(prompts, BEAMS, concurrency_limit=2) == together
    with pytest.raises(InputError, match="concurrency_limit"):
        llm.beam_search(prompts, BEAMS, concurrency_limit=0)
    assert llm.beam_search([], BEAMS) == []
    for beam in together[0].sequences:
        assert len(beam.logprobs) == 4
        chosen = [entries[token].logprob for entries, token in zip(beam.logprobs, beam.tokens[-4:], strict=True)]
        assert sum(chosen) == pytest.approx(beam.cum_logprob)


def test_log_probabilities_of_all_tokens(llm: LLM) -> None:
    vocab = int(llm.model_info.vocab)
    asked: dict[str, Any] = {"logprobs": -1, "prompt_logprobs": -1}
    (every,) = llm.generate(PROMPT, dataclasses.replace(GREEDY, **asked))
    (known,) = llm.generate(PROMPT, dataclasses.replace(GREEDY, logprobs=vocab, prompt_logprobs=vocab))
    assert every.outputs == known.outputs
    assert every.prompt_logprobs == known.prompt_logprobs
    assert [len(entries) for entries in every.outputs[0].logprobs or []] == [vocab] * 24


def test_copies_of_parameters() -> None:
    params = SamplingParams(stop=["a"], logit_bias={3: 1.0})
    copied = params.clone()
    assert copied == params
    assert copied.stop is not params.stop
    assert SamplingParams(seed=-1).seed is None
    assert dataclasses.replace(params, seed=-1).seed is None


def test_names_of_transformers_in_the_tokenizer(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.convert_tokens_to_ids("</s>") == 2
    assert tokenizer.convert_tokens_to_ids(["<s>", "no such token"]) == [1, None]
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, chat_template=TEMPLATE)
    assert text == PROMPT
    with pytest.raises(InputError, match="tokenize must be False, got True"):
        tokenizer.apply_chat_template(CHAT, tokenize=True, chat_template=TEMPLATE)


def test_finished_texts(llm: LLM) -> None:
    """vLLM has a method in CompletionOutput, and an attribute in RequestOutput."""
    states = [
        (output.outputs[0].finished, output.outputs[0].finished(), output.finished)
        for _, output in llm.stream(PROMPT, GREEDY)
    ]
    assert all(bool(text) is called for text, called, _ in states)
    assert [called for _, called, _ in states] == [whole for _, _, whole in states]
    assert [bool(text) for text, _, _ in states] == [False] * (len(states) - 1) + [True]
    assert [called for _, called, _ in states[-2:]] == [False, True]
    assert str(states[-1][0]) == "True"
