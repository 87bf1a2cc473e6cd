"""Streaming detokenization: however a sequence is cut into steps, its text is the same and no character is split."""

import itertools
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kvanta.checkpoint.resolve import SHIPPED
from kvanta.errors import InputError
from kvanta.text.detokenize import Detokenizer, TokenBytes, byte_level_alphabet
from kvanta.text.tokenizer import Tokenizer

STORIES = Tokenizer(SHIPPED / "stories260k")
ORACLE = tokenizers.Tokenizer.from_file(str(SHIPPED / "stories260k" / "tokenizer.json"))

# A byte-level vocabulary of the 256 single bytes: every text, and every broken one, can be spelled with it.
_ALPHABET = {byte: character for character, byte in byte_level_alphabet().items()}
BYTE_LEVEL = TokenBytes([_ALPHABET[byte] for byte in range(256)], {}, [], {"type": "ByteLevel"})

# Text that has broken detokenizers: several bytes a character, combining marks, joined emoji, surrogate-pair range,
# right-to-left, the replacement character itself, byte order marks, controls.
TORTURE = (
    "naïve café 日本語テキスト 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u202eabc\u202c العربية \ufffd \ufeff "
    "\x00\x07\t\r\n \u2028 𝔘𝔫𝔦 ﷽ 🇩🇪 \u200b|"
)


def cut(tokens: list[int], borders: list[int]) -> list[list[int]]:
    edges = [0, *sorted(border % (len(tokens) + 1) for border in borders), len(tokens)]
    return [tokens[begin:end] for begin, end in itertools.pairwise(edges)]


def stream(table: TokenBytes, pieces: list[list[int]], *, at_start: bool = True) -> list[str]:
    detokenizer = Detokenizer(table, at_start=at_start)
    return [*(detokenizer.add(piece) for piece in pieces), detokenizer.finish()]


@given(st.text(), st.lists(st.integers(0, 1000)))
def test_any_text_survives_any_cut(text: str, borders: list[int]) -> None:
    tokens = list(text.encode())
    shown = stream(BYTE_LEVEL, cut(tokens, borders))
    assert "".join(shown) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in shown)


@given(st.binary(), st.lists(st.integers(0, 1000)))
def test_broken_bytes_decode_alike_for_every_cut(data: bytes, borders: list[int]) -> None:
    assert "".join(stream(BYTE_LEVEL, cut(list(data), borders))) == data.decode(errors="replace")


@given(st.lists(st.integers(0, 511)), st.lists(st.integers(0, 1000)))
def test_any_tokens_decode_alike_for_every_cut(tokens: list[int], borders: list[int]) -> None:
    assert "".join(stream(STORIES.bytes, cut(tokens, borders))) == STORIES.decode(tokens)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_first_space_goes_where_the_tokenizer_puts_one(scheme: str) -> None:
    words = ["\u2581hi", "\u2581you"]
    table = TokenBytes(words, {}, [], {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme})
    assert "".join(stream(table, [[0], [1]])) == tokenizers.decoders.Metaspace(prepend_scheme=scheme).decode(words)


METASPACE: dict[str, object] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}
REPLACE: dict[str, object] = {"type": "Replace", "pattern": {"String": "_"}, "content": " "}
DECODERS: list[dict[str, object] | None] = [
    METASPACE,
    {**METASPACE, "prepend_scheme": "never"},
    {"type": "Sequence", "decoders": [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    {"type": "Sequence", "decoders": [{**REPLACE, "pattern": {"Regex": "_"}}, {"type": "Fuse"}]},
    None,  # tokens are joined with spaces
]


@pytest.mark.parametrize("decoder", DECODERS)
def test_decoders_with_other_characters_for_spaces(decoder: dict[str, object] | None, tmp_path: Path) -> None:
    vocabulary = {"_hi": 0, "_you": 1, "\u2581x": 2, "<0x41>": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="_hi"))
    description = {**json.loads(tokenizer.to_str()), "decoder": decoder}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    oracle = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for tokens in itertools.permutations(range(4)):
        assert Tokenizer(tmp_path).decode(tokens) == oracle.decode(tokens)
        assert "".join(stream(Tokenizer(tmp_path).bytes, [[token] for token in tokens])) == oracle.decode(tokens)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "its decoder is 'WordPiece'; supported are Byte"),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "its decoder is 'BPEDecoder'"),
        ({"type": "Strip", "content": " ", "start": 2, "stop": 0}, "strips other characters than one space"),
        ({"type": "Replace", "pattern": {"Regex": "_+"}, "content": " "}, r"replaces the pattern '_\+'"),
    ],
)
def test_decoders_whose_text_would_be_wrong_are_refused(
    decoder: dict[str, object], message: str, tmp_path: Path
) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    (tmp_path / "tokenizer.json").write_text(json.dumps({**json.loads(tokenizer.to_str()), "decoder": decoder}))
    with pytest.raises(InputError, match=f"is not a usable tokenizer: .*{message}"):
        Tokenizer(tmp_path)


def test_metaspace_of_older_files(tmp_path: Path) -> None:
    """Only add_prefix_space, which newer versions of `tokenizers` refuse where it is false."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"hi": 0, "\u2581hi": 1}, unk_token="hi"))
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "str_rep": "\u2581"}

    def read(prefix: bool) -> Tokenizer:
        step = {**metaspace, "add_prefix_space": prefix}
        parts = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [step]}, "decoder": step}
        (tmp_path / "tokenizer.json").write_text(json.dumps({**json.loads(tokenizer.to_str()), **parts}))
        return Tokenizer(tmp_path)

    assert read(prefix=True).encode("hi hi") == [1, 1]
    assert read(prefix=True).decode([1, 1]) == "hi hi"
    assert read(prefix=False).encode("hi hi") == [0, 1]
    assert read(prefix=False).decode([1, 1]) == " hi hi"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_agrees_with_the_tokenizers_library(text: str) -> None:
    tokens = STORIES.encode(text)
    assert STORIES.decode(tokens) == ORACLE.decode(tokens)


def test_torture_text_one_token_at_a_time() -> None:
    tokens = STORIES.encode(TORTURE)
    shown = stream(STORIES.bytes, [[token] for token in tokens])
    assert "".join(shown) == TORTURE
    assert sum(piece.count("\ufffd") for piece in shown) == 1  # the one that is in the text
    assert len(tokens) > len(TORTURE), "the shipped vocabulary must need byte tokens for this"


def test_an_unfinished_character_is_shown_at_the_end_only() -> None:
    euro = list("€".encode())
    assert stream(BYTE_LEVEL, [[euro[0]], [euro[1]], [euro[2]]]) == ["", "", "€", ""]
    assert stream(BYTE_LEVEL, [[euro[0]], [euro[1]]]) == ["", "", "\ufffd"]


def test_a_first_space_belongs_to_the_text_unless_it_is_the_tokenizers_own() -> None:
    word = STORIES.encode("girl")[1:]  # after <s>: U+2581 and the word
    assert "".join(stream(STORIES.bytes, [[token] for token in word], at_start=True)) == "girl"
    assert "".join(stream(STORIES.bytes, [word], at_start=False)) == " girl"
    prompt, rest = STORIES.encode("Once upon"), STORIES.encode("a time")[1:]
    after = STORIES.detokenizer(prompt)
    assert STORIES.decode(prompt) + after.add(rest) + after.finish() == "Once upon a time"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokens = STORIES.encode("Hi")
    assert STORIES.decode([*tokens, 2]) == "Hi"
    assert STORIES.decode([*tokens, 2], skip_special_tokens=False).startswith("<s>")
    assert STORIES.decode([*tokens, 2], skip_special_tokens=False).endswith("</s>")


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert STORIES.bytes[512] == b""
    assert STORIES.bytes[-1] == b""
    assert STORIES.decode([999_999]) == ""


def test_added_tokens_are_literal_in_a_byte_level_vocabulary(tmp_path: Path) -> None:
    # "é" as an added token is that character, not the byte 0xE9 that it stands for inside the alphabet.
    description = json.loads((SHIPPED / "stories260k" / "tokenizer.json").read_text(encoding="utf-8"))
    assert description["decoder"]["type"] == "Sequence"
    table = TokenBytes(["é", "é!"], {1: "é!"}, [], {"type": "ByteLevel"})
    assert table[0] == b"\xe9"
    assert table[1] == "é!".encode()
