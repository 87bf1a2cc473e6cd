"""Texts of a given form: each that ends by itself has it, others in the batch are unchanged, bad forms are errors."""

import json
import re
import subprocess
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest

from kvanta import LLM, InputError, SamplingParams, StructuredOutputsParams, _core
from kvanta.constraints import structured_output
from kvanta.constraints.structured_output import GrammarCompiler, fill_masks

PROMPT = "Once upon a time"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", '"quoted"']}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GBNF = 'root ::= "say " word (", " word)? "."\nword ::= [a-z]{2,9}'
LARK = 'start: "(" inner ")"\ninner: /[0-9]{1,4}/ | start'
FORMS: dict[str, StructuredOutputsParams] = {
    "json": StructuredOutputsParams(json=PERSON),
    "json text": StructuredOutputsParams(json=json.dumps(PERSON)),
    "regex": StructuredOutputsParams(regex=r"[A-Z][a-z]{2,8} is \d{1,3} years old\."),
    "choice": StructuredOutputsParams(choice=["yes", "no", 'say "maybe"\n', "größer"]),
    "gbnf": StructuredOutputsParams(grammar=GBNF),
    "lark": StructuredOutputsParams(grammar=LARK),
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("stories260k", kv_cache_dtype="int8", kv_cache_memory_bytes="32MiB", threads=2)


def fits(name: str, text: str) -> bool:
    """By other parsers than the one that made the masks."""
    if name.startswith("json"):
        value = json.loads(text)
        return (
            set(value) == set(PERSON["required"])
            and isinstance(value["name"], str)
            and 1 <= len(value["name"]) <= 12
            and type(value["age"]) is int
            and 0 <= value["age"] <= 130
            and len(value["tags"]) <= 2
            and set(value["tags"]) <= {"red", "grün", '"quoted"'}
        )
    if name == "choice":
        return text in (FORMS["choice"].choice or ())
    patterns = {
        "regex": str(FORMS["regex"].regex),
        "gbnf": r"say [a-z]{2,9}(, [a-z]{2,9})?\.",
        "lark": r"(?:\()+[0-9]{1,4}(?:\))+",
    }
    return re.fullmatch(patterns[name], text) is not None and text.count("(") == text.count(")")


@pytest.mark.parametrize("name", FORMS)
def test_every_text_has_its_form(llm: LLM, name: str) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=480, structured_outputs=FORMS[name])
    chance = SamplingParams(temperature=1.2, max_tokens=480, n=12, seed=5, structured_outputs=FORMS[name])
    outputs = [text for output in llm.generate([PROMPT] * 2, [greedy, chance]) for text in output.outputs]
    assert len(outputs) == 13
    for text in outputs:
        assert text.finish_reason == "stop", text.text
        assert fits(name, text.text), text.text
    if name != "choice":
        assert len({text.text for text in outputs}) > 3


def test_any_json_object(llm: LLM) -> None:
    """A weak model's strings may be long: what ends by itself is an object, the rest is the beginning of one."""
    form = StructuredOutputsParams(json_object=True)
    ends = [token for token in range(len(llm.tokenizer)) if llm.tokenizer.bytes[token] in (b'"', b"}")]
    bias = dict.fromkeys(ends, 12.0)
    params = SamplingParams(temperature=1.0, max_tokens=120, n=20, seed=1, logit_bias=bias, structured_outputs=form)
    texts = llm.generate(PROMPT, params)[0].outputs
    ended = [text.text for text in texts if text.finish_reason == "stop"]
    assert all(isinstance(json.loads(text), dict) for text in ended)
    assert len(ended) > 5
    assert all(text.text.lstrip().startswith("{") for text in texts)


def test_others_in_the_batch_are_unchanged(llm: LLM) -> None:
    prompts = ["Lily and the dog", PROMPT, "The sun"]
    free = [SamplingParams(temperature=t, seed=3, max_tokens=60, logprobs=2) for t in (0.0, 0.9, 1.0)]
    alone = [llm.generate(prompt, params)[0].outputs[0] for prompt, params in zip(prompts, free, strict=True)]
    bound = [
        SamplingParams(temperature=0.8, seed=1, max_tokens=450, structured_outputs=form) for form in FORMS.values()
    ]
    mixed = llm.generate([*prompts, *[PROMPT] * len(bound)], [*free, *bound])
    for before, after in zip(alone, mixed, strict=False):
        assert after.outputs[0].token_ids == before.token_ids
        assert after.outputs[0].logprobs == before.logprobs
    for name, output in zip(FORMS, mixed[len(prompts) :], strict=True):
        assert fits(name, output.outputs[0].text)


def test_the_batch_changes_no_constrained_text(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=450, structured_outputs=FORMS["json"])
    alone = llm.generate(PROMPT, params)[0].outputs[0].token_ids
    crowd = [SamplingParams(temperature=1.0, seed=seed, max_tokens=50) for seed in range(8)]
    assert llm.generate([PROMPT] * 9, [params, *crowd])[0].outputs[0].token_ids == alone


def test_a_constrained_text_ends_in_spite_of_ignore_eos_and_min_tokens(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=50, min_tokens=40, ignore_eos=True, structured_outputs=FORMS["choice"]
    )
    (text,) = llm.generate(PROMPT, params)[0].outputs
    assert fits("choice", text.text)
    assert text.finish_reason == "stop"


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    """Log-probabilities are of the unmasked distribution: a choice that the model would never make has a low one."""
    params = SamplingParams(temperature=0.0, logprobs=1, structured_outputs=StructuredOutputsParams(choice=["zzzz"]))
    (text,) = llm.generate(PROMPT, params)[0].outputs
    assert text.text == "zzzz"
    assert (text.cumulative_logprob or 0) < -20


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": (
        {},
        "structured_outputs has nothing: one of json, json_object, regex, choice, grammar, structural_tag is needed",
    ),
    "two": ({"regex": "a", "json_object": True}, "structured_outputs has json_object and regex"),
    "type": ({"json": 3}, "json must be a JSON schema as a text or an object, got 3"),
    "no json": ({"json": '{"type":'}, "json is not a JSON schema"),
    "no object": ({"json": "[1]"}, "json must be a JSON schema"),
    "unknown type": ({"json": {"type": "nonsense"}}, "json cannot be used: Invalid type: nonsense"),
    "bad pattern": ({"json": {"type": "string", "pattern": "(a"}}, "json cannot be used: regex parse error"),
    "outside": ({"json": {"$ref": "http://example.com/x"}}, "json cannot be used: Resource"),
    "impossible": ({"json": {"enum": []}}, "json cannot be used: Unsatisfiable schema"),
    "false": ({"json": False}, "json must be a JSON schema as a text or an object, got False"),
    "not json": ({"json": {"enum": [{1, 2}]}}, "json is not a JSON schema"),
    "regex": ({"regex": "[a"}, "regex cannot be used"),
    "look-ahead": ({"regex": "a(?=b)"}, "look-around"),
    "surrogate": ({"regex": "\ud800"}, "regex must be a text of valid Unicode, got '\\ud800'"),
    "choice": ({"choice": []}, "choice must be a list of texts, got []"),
    "choice text": ({"choice": "abc"}, "choice must be a list of texts, got 'abc'"),
    "choice type": ({"choice": ["a", 1]}, "an entry of choice must be a text of valid Unicode, got 1"),
    "grammar": ({"grammar": "start: foo"}, 'grammar cannot be used: at 1(8): unknown name: "foo"'),
    "no root": ({"grammar": ""}, "No 'root' rule found"),
    "deep": ({"json": '{"items":' * 5000 + "{}" + "}" * 5000}, "json"),
    "long": ({"regex": "a" * 300000}, "at most 262144 are read"),
}


@pytest.mark.parametrize(("form", "reason"), BAD.values(), ids=BAD.keys())
def test_bad_forms_are_one_line(llm: LLM, form: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError) as caught:
        llm.generate(PROMPT, SamplingParams(structured_outputs=StructuredOutputsParams(**form)))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert llm.stats()["running"] == llm.stats()["waiting"] == 0


def test_a_wrong_class(llm: LLM) -> None:
    wrong: Any = {"json": {}}
    with pytest.raises(InputError, match="must be StructuredOutputsParams or None"):
        SamplingParams(structured_outputs=wrong)


def test_without_the_package() -> None:
    """The other commands need no llguidance, and structured output says what is missing."""
    code = """if True:
        import sys
        sys.modules["llguidance"] = None
        from kvanta import LLM, SamplingParams, StructuredOutputsParams
        llm = LLM("stories260k", kv_cache_memory_bytes="8MiB")
        assert llm.generate("a", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
        try:
            llm.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)))
        except ValueError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'kvanta[structured]'" in done.stdout


def make_engine(llm: LLM, **options: Any) -> tuple[_core.Engine, GrammarCompiler]:
    config = _core.EngineConfig()
    config.model = llm.config.model
    config.kv_cache_memory_bytes = 16 << 20
    config.threads = 1
    for name, value in options.items():
        setattr(config, name, value)
    config.set_fill_masks(fill_masks)
    engine = _core.Engine(config)
    return engine, GrammarCompiler(llm.tokenizer, engine.info)


def test_on_the_engines_own_thread(llm: LLM) -> None:
    """Constraints come and go, as in a server, while other threads hold the GIL and read statistics."""
    engine, compiler = make_engine(llm)
    texts: dict[str, list[int]] = {}
    ends = threading.Semaphore(0)

    def hear(engine_output: list[_core.EngineOutput]) -> None:
        for entry in engine_output:
            texts.setdefault(entry.id, []).extend(entry.tokens)
            if entry.finish != _core.FinishReason.NONE:
                ends.release()

    engine.start(hear)
    names = list(FORMS)
    for number in range(40):
        sampling = _core.SamplingParams()
        sampling.max_tokens = 450
        sampling.seed = number
        constraint = _core.TokenConstraint(compiler.matcher(FORMS[names[number % len(names)]]))
        engine.add(str(number), llm.tokenizer.encode(PROMPT), sampling, constraint=constraint)
        del constraint
        if number % 8 == 7:
            engine.abort(str(number))
        engine.stats()
    for _ in range(40):
        ends.acquire()
    engine.stop(drain=True)
    for number in range(40):
        if number % 8 == 7:
            continue
        text = llm.tokenizer.decode(texts[str(number)])
        assert fits(names[number % len(names)], text), text


def test_faults_of_the_filler_end_the_request(llm: LLM) -> None:
    engine, _ = make_engine(llm)
    engine.add("a", [1, 2], _core.SamplingParams(), constraint=_core.TokenConstraint("no matcher"))
    (engine_output,) = engine.step() or []
    assert engine_output.finish == _core.FinishReason.ERROR
    assert engine_output.error.startswith("the constraint failed: AttributeError")
    assert not engine_output.invalid_input


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_a_signal_within_the_filler_reaches_the_caller(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    """Handlers of signals run in Python's main thread, which may be filling masks."""
    steps: list[None] = []

    def interrupted(*arguments: Any) -> Exception | None:
        steps.append(None)
        if len(steps) == 3:
            raise raised
        return fill(*arguments)

    fill = structured_output._fill_mask
    monkeypatch.setattr(structured_output, "_fill_mask", interrupted)
    params = SamplingParams(max_tokens=64, structured_outputs=FORMS["gbnf"])
    with pytest.raises(raised):
        llm.generate(PROMPT, params)
    assert llm.stats()["running"] == llm.stats()["waiting"] == 0
    assert fits("gbnf", llm.generate(PROMPT, params)[0].outputs[0].text)


def test_a_fault_of_one_matcher_ends_no_other_request(llm: LLM) -> None:
    engine, compiler = make_engine(llm)
    sampling = _core.SamplingParams()
    sampling.max_tokens = 400
    for name, state in (("broken", "no matcher"), ("good", compiler.matcher(FORMS["choice"]))):
        engine.add(name, llm.tokenizer.encode(PROMPT), sampling, constraint=_core.TokenConstraint(state))
    ends: dict[str, Any] = {}
    tokens: list[int] = []
    while len(ends) < 2:
        for output in engine.step() or []:
            tokens += output.tokens
            if output.finish != _core.FinishReason.NONE:
                ends[output.id] = output.finish
    assert ends == {"broken": _core.FinishReason.ERROR, "good": _core.FinishReason.STOP}
    assert fits("choice", llm.tokenizer.decode(tokens))


def test_a_tokenizer_with_more_tokens_than_the_model(llm: LLM) -> None:
    """Its masks have the model's size, and spell texts with the model's tokens."""
    info: Any = types.SimpleNamespace(vocab=480, eos_token_ids=[2])
    text = next(text for text in (llm.tokenizer.decode([token]) for token in range(480, 512)) if text.isalpha())
    assert max(llm.tokenizer.encode(text, add_special_tokens=False)) >= 480
    compiler = GrammarCompiler(llm.tokenizer, info)
    masks = np.zeros((1, 15), dtype=np.uint32)
    assert fill_masks([compiler.matcher(StructuredOutputsParams(choice=[text]))], [[]], masks) == [None]
    assert masks.any()


def test_a_model_without_an_end_token(llm: LLM) -> None:
    class Info:
        vocab = llm.model_info.vocab
        eos_token_ids: list[int] = []  # noqa: RUF012

    info: Any = Info()
    state: list[Any] = []
    compiler = GrammarCompiler(llm.tokenizer, info)
    grammar = compiler._matcher('start: "a"', "grammar")
    state.append(grammar)
    masks = np.zeros((1, 16), dtype=np.uint32)
    assert fill_masks(state, [[]], masks) == [None]
    allowed = [token for token in range(512) if masks[0, token // 32] >> (token % 32) & 1]
    assert allowed
    assert {llm.tokenizer.bytes[token] for token in allowed} == {b"a"}
    masks[:] = 0
    assert fill_masks(state, [allowed[:1]], masks) == [None]
    assert not masks.any(), "nothing may follow"
