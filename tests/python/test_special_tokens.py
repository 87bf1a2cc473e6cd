"""Special and added tokens that a folder names outside tokenizer.json: transformers' ids and flags."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvanta import InputError
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.text.tokenizer import Tokenizer

START, END = "<|im_start|>", "<|im_end|>"
TEXT = f"{START} user\nHi{END}\nonce <|vision|> more"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped model with 520 rows, which is 8 more than its tokenizer has tokens."""
    copy = Path(shutil.copytree(SHIPPED / "stories260k", tmp_path / "model"))
    change(copy / "config.json", vocab_size=520)
    return copy


def change(file: Path, **values: Any) -> None:
    """Sets keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) if file.is_file() else {}
    kept = {**content, **values}
    file.write_text(json.dumps({name: value for name, value in kept.items() if value is not None}))


def added(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, **dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False), **flags}


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "decoder": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "512": added(START, special=True),
                "513": added(END, special=True),
                "514": added("<|vision|>", special=False),
            }
        }
    },
    "decoder changes a flag": {
        "tokenizer_config.json": {"added_tokens_decoder": {"2": added("</s>", special=True, rstrip=True)}}
    },
    "added_tokens.json": {"added_tokens.json": {START: 512, END: 513, "<|vision|>": 514}},
    "named among them": {
        "added_tokens.json": {END: 512},
        "tokenizer_config.json": {"eos_token": END},
    },
    "additional": {"tokenizer_config.json": {"additional_special_tokens": [START, END, "<|vision|>"]}},
    "extra list": {"tokenizer_config.json": {"extra_special_tokens": [START, END]}},
    "additional with flags": {
        "tokenizer_config.json": {
            "additional_special_tokens": [{"__type": "AddedToken", **added(START, rstrip=True, special=True)}, END]
        }
    },
    "a name with flags": {"tokenizer_config.json": {"pad_token": {"__type": "AddedToken", **added(END, lstrip=True)}}},
    "names of the model's own": {"tokenizer_config.json": {"model_specific_special_tokens": {"image_token": START}}},
    "extra names": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<|vision|>"}}},
    "names": {"tokenizer_config.json": {"sep_token": START, "cls_token": END, "video_token": "<|vision|>"}},
    "a name of a word": {"tokenizer_config.json": {"pad_token": "once"}},
    "the map": {"special_tokens_map.json": {"eos_token": END, "additional_special_tokens": [START]}},
}


@pytest.mark.parametrize("files", CASES.values(), ids=CASES.keys())
def test_ids_and_flags_are_those_of_transformers(files: dict[str, dict[str, Any]], folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, values in files.items():
        change(folder / name, **values)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = Tokenizer(folder)
    expected = oracle.encode(TEXT, add_special_tokens=False)
    assert tokenizer.encode(TEXT, add_special_tokens=False) == expected
    assert tokenizer.eos_id == oracle.eos_token_id
    special = {index for index, token in oracle.added_tokens_decoder.items() if token.special}
    assert tokenizer.bytes.special == special
    named = {name: text for name, text in oracle.special_tokens_map.items() if isinstance(text, str)}
    assert {name: tokenizer.special_texts.get(name) for name in named} == named


def test_a_chat_of_a_fine_tune_has_whole_tokens(folder: Path) -> None:
    change(folder / "tokenizer_config.json", additional_special_tokens=[START, END], eos_token=END)
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode(f"{START}{END}", add_special_tokens=False) == [513, 512]
    assert tokenizer.eos_id == 512
    assert tokenizer.place_of("eos_token") == "tokenizer_config.json"


def test_a_name_without_a_row_is_no_token(folder: Path) -> None:
    change(folder / "config.json", vocab_size=512)
    change(folder / "tokenizer_config.json", pad_token="<pad>")
    tokenizer = Tokenizer(folder)
    assert len(tokenizer) == 512
    assert tokenizer.tokens_without_rows == ["<pad>"]
    assert max(tokenizer.encode("<pad>")) < 512


@pytest.mark.parametrize("value", [True, False])
def test_tokenizer_json_decides_on_the_first_token(value: bool, folder: Path) -> None:
    """As in transformers, for its classes without a rule of their own (transformers#30947)."""
    description = json.loads((folder / "tokenizer.json").read_text())
    if value:
        description["post_processor"] = None
        (folder / "tokenizer.json").write_text(json.dumps(description))
    change(folder / "tokenizer_config.json", add_bos_token=value)
    assert (Tokenizer(folder).encode("Hi")[0] == 1) is not value
    change(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    assert (Tokenizer(folder).encode("Hi")[0] == 1) is value


def test_special_texts_are_variables_of_the_template(folder: Path) -> None:
    template = "{{ cls_token }}{{ image_token }}{{ messages[0].content }}"
    change(folder / "tokenizer_config.json", cls_token="<s>", image_token="</s>", chat_template=template)
    assert Tokenizer(folder).apply_chat_template([{"role": "user", "content": "Hi"}]) == "<s></s>Hi"


def test_a_template_that_cannot_be_read_is_named_at_the_first_chat(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}")
    tokenizer = Tokenizer(folder)
    chat = [{"role": "user", "content": "Hi"}]
    for _ in range(2):
        with pytest.raises(
            InputError, match=r"chat template \(chat_template\.jinja\) cannot be read: .*--chat-template"
        ):
            tokenizer.apply_chat_template(chat)
    tokenizer.use_chat_template("{{ messages[0].content }}")
    assert tokenizer.apply_chat_template(chat) == "Hi"
