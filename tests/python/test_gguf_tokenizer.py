"""Tokenizers from GGUF files give the tokens of the source."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from test_tokenizer_files import TEXTS, field, piece, trained

from kvanta import InputError
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.gguf.pre_tokenizers import PRE_TOKENIZERS
from kvanta.gguf.tokenizer import byte_level_bpe, merges_by_order, sentencepiece_bpe
from kvanta.text.tokenizer_files.sentencepiece_model import Kind, read_model


def greedy_merges(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's BPE as llama2.c writes it: merge the best-scored adjacent pair until none is left."""
    index = {token: position for position, token in enumerate(tokens)}
    ids: list[int] = []
    for character in ("\u2581" + text.replace(" ", "\u2581")) if text else "":
        if character in index:
            ids.append(index[character])
        else:
            ids += [index[f"<0x{byte:02X}>"] for byte in character.encode()]
    while True:
        best, place, merged = -1e30, -1, -1
        for position in range(len(ids) - 1):
            joined = index.get(tokens[ids[position]] + tokens[ids[position + 1]])
            if joined is not None and scores[joined] > best:
                best, place, merged = scores[joined], position, joined
        if place < 0:
            return ids
        ids[place : place + 2] = [merged]


def stories_vocabulary() -> tuple[list[str], list[float], tokenizers.Tokenizer]:
    path = SHIPPED / "stories260k" / "tokenizer.json"
    vocabulary: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    scores = [0.0] * 259 + [-float(index) for index in range(len(tokens) - 259)]  # as in the original tok512.bin
    return tokens, scores, tokenizers.Tokenizer.from_file(str(path))


STORIES = stories_vocabulary()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text("the wa ndo,.", max_size=60))
def test_sentencepiece_bpe_equals_greedy_merges_by_score(text: str) -> None:
    tokens, scores, tokenizer = STORIES
    text = text.replace("\u2581", "").replace("<", "")  # what stands for a space, and what begins a special token
    assert tokenizer.encode(text, add_special_tokens=False).ids == greedy_merges(text, tokens, scores)


def test_the_shipped_tokenizer_is_what_the_converter_makes() -> None:
    tokens, scores, tokenizer = STORIES
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    made = sentencepiece_bpe(tokens, kinds, scores, unknown_id=0, bos_id=1, add_space_prefix=True)
    text = "Once upon a time, 日本 there was."
    assert tokenizers.Tokenizer.from_str(json.dumps(made)).encode(text).ids == tokenizer.encode(text).ids


def runs_of_spaces() -> bytes:
    """A model of SentencePiece whose pieces for runs of spaces all have one score, as those of added tokens do."""
    texts = ["\u2581", "a", *("\u2581" * length for length in range(2, 17)), "\u2581a", "\u2581\u2581a"]
    pieces = piece("<unk>", Kind.UNKNOWN) + b"".join(piece(text, Kind.NORMAL) for text in texts)
    return pieces + field(2, field(3, 2)) + field(3, field(3, 1) + field(4, 0))


@pytest.mark.parametrize("kind", ["llama", "gemma", "runs_of_spaces"])
def test_agreement_with_sentencepiece(kind: str, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    data = runs_of_spaces() if kind == "runs_of_spaces" else trained(kind)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=data)
    (tmp_path / "tokenizer.model").write_bytes(data)
    model = read_model(tmp_path / "tokenizer.model")
    made = sentencepiece_bpe(
        [each.text for each in model.pieces],
        [int(each.kind) for each in model.pieces],
        [each.score for each in model.pieces],
        unknown_id=oracle.unk_id(),
        bos_id=None,
        add_space_prefix=model.adds_prefix,
    )
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(made))
    for text in [" " * length + "a" for length in range(70)] + (TEXTS if kind != "runs_of_spaces" else []):
        assert tokenizer.encode(text).ids == oracle.encode(text), text


ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


SINGLE_DIGITS = {
    *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "qwen2", "deepseek-r1-qwen"),
    *("stablelm2", "hunyuan", "solar-open", "grok-2", "qwen35", "tekken", "deepseek-llm", "deepseek-coder"),
    *("exaone-moe", "seed-coder", "youtu", "kormo", "f2llmv2", "bailingmoe", "bailingmoe2", "llada-moe", "viking"),
    *("superbpe", "afmoe"),  # cut groups of three off, from the right
}


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_byte_level_bpe_round_trips(pre: str) -> None:
    tokens = ["<|end|>", *ALPHABET, "he", "ll", "hell", "12"]
    types = [3] + [1] * (len(tokens) - 1)
    description = byte_level_bpe(tokens, types, ["h e", "l l", "he ll", "1 2"], pre, None)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description))
    text = "hello  Wörld 1234\r\n\n don't 日本<|end|>"
    encoding = tokenizer.encode(text)
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    assert encoding.ids[0] == tokens.index("hell")
    assert encoding.ids[-1] == 0
    digits = [piece for piece in encoding.tokens if piece.isdigit()]
    # Three digits stay together for llama-bpe, all for gpt-2; these cut every digit off.
    assert ("12" in digits) == (pre not in SINGLE_DIGITS)


def test_an_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(InputError, match=r"'talkie'.*known: .*smollm"):
        byte_level_bpe(["a"], [1], [], "talkie", None)


@pytest.mark.parametrize(
    ("tokens", "merges", "reason"),
    [
        (["a", "a"], [], "twice"),
        (["a", "b", "ab"], ["a c"], "'a c'"),
        (["a", "b"], ["a b"], "'a b'"),
        (["a", "b"], ["ab"], "'ab'"),
    ],
)
def test_broken_vocabularies(tokens: list[str], merges: list[str], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        byte_level_bpe(tokens, [1] * len(tokens), merges, "gpt-2", None)


def test_merges_by_the_order_of_tokens() -> None:
    tokens = [*ALPHABET, "he", "ll", "lo", "hell", "hello"]
    merges = merges_by_order(tokens, [1] * len(tokens))
    assert merges == ["h e", "l l", "l o", "he ll", "hell o"]
    description = byte_level_bpe(tokens, [1] * len(tokens), merges, "kimi-k2", None)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description))
    assert tokenizer.encode("hello hell lo").tokens == ["hello", "\u0120", "hell", "\u0120", "lo"]


PIECES = {
    # Texts as the models' own tokenizers cut them, by their published patterns.
    "gpt-4o": ("HelloWorld don't 1234 a/b\n", ["Hello", "World", " don't", " ", "123", "4", " a", "/b", "\n"]),
    "tekken": ("HelloWorld don't 12", ["Hello", "World", " don", "'t", " ", "1", "2"]),
    "deepseek-v3": ("a1234漢字kana .x", ["a", "123", "4", "漢字", "kana", " .", "x"]),
    "deepseek-llm": ("Don't 12漢字", ["Don", "'", "t", " ", "1", "2", "漢字"]),
    "kimi-k2": ("漢字abc 1234 it's", ["漢字", "abc", " ", "123", "4", " it's"]),
    "glm4": ("it's 1234 x", ["it", "'s", " ", "123", "4", " x"]),
    "falcon": ("a=b 1234", ["a", "=", "b", " ", "123", "4"]),
    "exaone4": ("it's 1234 x", ["it", "'s", " 1234", " x"]),
    "seed-coder": ("don't 12 a+\nb", ["don", "'t", " ", "1", "2", " a", "+", "\n", "b"]),
    "youtu": (
        "HelloWorld漢字，한국 don't 12/\n",
        ["Hello", "World", "漢字", "，", "한국", " don't", " ", "1", "2", "/\n"],
    ),
    "afmoe": ("it's 12345 漢字 x", ["it", "'s", " ", "12", "345", " ", "漢字", " x"]),
    "qwen35": ("cafe\u0301 12", ["caf\u00e9", " ", "1", "2"]),
}


@pytest.mark.parametrize("pre", PIECES)
def test_pieces(pre: str) -> None:
    text, expected = PIECES[pre]
    description = byte_level_bpe(ALPHABET, [1] * len(ALPHABET), [], pre, None)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description))
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    found = [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == expected
