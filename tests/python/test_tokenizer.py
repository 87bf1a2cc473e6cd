"""Tokenizers of model folders: text to ids and back, whatever the text, and files that are not what they should be."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_detokenize import TORTURE

from kvanta import InputError
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.text.tokenizer import Tokenizer

STORIES = Tokenizer(SHIPPED / "stories260k")


def folder_with(tmp_path: Path, tokenizer: str | bytes | None = None, **config: Any) -> Path:
    source = SHIPPED / "stories260k"
    data = (source / "tokenizer.json").read_bytes() if tokenizer is None else tokenizer
    (tmp_path / "tokenizer.json").write_bytes(data.encode() if isinstance(data, str) else data)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back(text: str) -> None:
    plain = text.replace("\u2581", "").replace("<", "")  # what stands for a space; what begins a special token
    assert STORIES.decode(STORIES.encode(plain)) == plain


def test_torture_text_comes_back() -> None:
    assert STORIES.decode(STORIES.encode(TORTURE)) == TORTURE


def test_beginning_of_sequence(tmp_path: Path) -> None:
    assert STORIES.encode("Hi")[0] == STORIES.bos_id == 1
    assert STORIES.encode("Hi", add_special_tokens=False)[0] != 1
    assert STORIES.encode("") == [1]
    without = Tokenizer(folder_with(tmp_path, bos_token="<s>", add_bos_token=False))
    assert without.encode("Hi") == STORIES.encode("Hi", add_special_tokens=False)
    assert without.encode("<s>Hi")[0] == 1  # the text itself has it

    description = json.loads((SHIPPED / "stories260k" / "tokenizer.json").read_text(encoding="utf-8"))
    description["post_processor"] = None
    added = Tokenizer(folder_with(tmp_path, json.dumps(description), bos_token={"content": "<s>"}, add_bos_token=True))
    assert added.encode("Hi") == STORIES.encode("Hi")
    silent = Tokenizer(folder_with(tmp_path, json.dumps(description), bos_token="<s>"))
    assert silent.encode("Hi") == STORIES.encode("Hi", add_special_tokens=False)


def test_special_tokens_from_their_own_file(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>", "lstrip": False}}))
    assert Tokenizer(folder).eos_id == 2


def test_truncation_and_padding_of_the_file_do_not_act(tmp_path: Path) -> None:
    description = json.loads((SHIPPED / "stories260k" / "tokenizer.json").read_text(encoding="utf-8"))
    description["truncation"] = {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    text = "a long text that is longer than four tokens"
    assert Tokenizer(folder_with(tmp_path, json.dumps(description), bos_token="<s>")).encode(text) == STORIES.encode(
        text
    )


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InputError, match="surrogate at character 1"):
        STORIES.encode("a\ud800")


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(InputError, match="not bytes"):
        STORIES.encode(b"bytes")  # type: ignore[arg-type]


BAD = {
    "empty": "",
    "not JSON": "{",
    "a list": "[]",
    "not UTF-8": b"\xff\xfe{}",
    "no model": "{}",
    "unknown model": '{"model": {"type": "Nonsense"}}',
    "lying merges": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
    "negative id": '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
    "huge id": '{"model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}}',
    "deep": "[" * 100_000,
    "null": "null",
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_a_damaged_tokenizer_is_one_clear_error(data: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^[^\n]*tokenizer\.json[^\n]*$"):
        Tokenizer(folder_with(tmp_path, data))


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    names = (
        r"tokenizer\.json, tekken\.json, tokenizer\.model, \*\.tiktoken, tiktoken\.model, vocab\.json with merges\.txt"
    )
    with pytest.raises(InputError, match=f"has no tokenizer: none of {names}"):
        Tokenizer(tmp_path)


def test_a_damaged_configuration(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer(folder)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"bos_token": "\ud800"}, "bos_token of .*not valid Unicode"),
        ({"eos_token": {"content": "a\udfff"}}, "eos_token of .*not valid Unicode"),
    ],
)
def test_a_hostile_configuration(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        Tokenizer(folder_with(tmp_path, **config))
    assert str(caught.value).isprintable()


def test_templates_with_strange_names(tmp_path: Path) -> None:
    templates = [{"name": [], "template": "a"}, 5, {"name": "default", "template": "b"}]
    template = Tokenizer(folder_with(tmp_path, chat_template=templates)).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "b"


@pytest.mark.parametrize("kind", ["WordLevel", "BPE"])
def test_a_vocabulary_without_its_unknown_token(kind: str, tmp_path: Path) -> None:
    model = {"type": kind, "vocab": {}, "merges": [], "unk_token": "x"}
    tokenizer = Tokenizer(folder_with(tmp_path, json.dumps({"model": model})))
    with pytest.raises(InputError, match=r"tokenizer\.json cannot encode the text: [^\n]*$"):
        tokenizer.encode("a")


def test_agreement_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(SHIPPED / "stories260k")
    for text in ["Once upon a time", "", " two  spaces ", TORTURE]:
        assert STORIES.encode(text) == oracle(text)["input_ids"]
