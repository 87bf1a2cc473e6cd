"""Tokenizers of folders without tokenizer.json: the ids of the original packages, on texts of every kind."""

from __future__ import annotations

import base64
import io
import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_detokenize import TORTURE

from kvanta import LLM, InputError, SamplingParams
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.text.detokenize import byte_level_alphabet
from kvanta.text.tokenizer import Tokenizer
from kvanta.text.tokenizer_files import read_description
from kvanta.text.tokenizer_files import tiktoken as tiktoken_files

CORPUS = [
    "Once upon a time there was a little girl. She said: \"I'll go!\" and they'd gone.\n",
    "def f(x):\n    if x == 12345:\n\t\treturn x ** 2  # 3.14159\n\n\n",
    "Größe, naïve café, Ωμέγα, Привет мир, שלום, مرحبا, नमस्ते, 你好世界，こんにちは, 안녕하세요\r\n",
    "a  b   c    d     e \u00a0 \u3000 x \t y",
    "🙂🙃 👩‍👩‍👧‍👦 🇩🇪 e\u0301 \ufb01 ｆｕｌｌ ① ½ 1,234,567 10000000",
    "  two spaces first, and last  ",
    "ABCdef camelCase HTTPServer McDonald's O'Neill WE'RE don't",
]
TEXTS = [*CORPUS, TORTURE, "", " ", "\n", "\n\n\n", "a", "\u2581", "x" * 200, " " * 37, "\x00\x01\x7f", "\U0010fffd"]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\t'0aZé漢🙂"), max_size=40)
GPT4_PATTERN = tiktoken_files._LLAMA3


def stream(tokenizer: Tokenizer, tokens: list[int]) -> str:
    detokenizer = tokenizer.detokenizer([])
    return "".join(detokenizer.add([token]) for token in tokens) + detokenizer.finish()


# SentencePiece


@cache
def trained(kind: str, **_: Any) -> bytes:
    """A model of SentencePiece's own trainer. Scripts that are not in the corpus fall back to bytes, or are unknown."""
    sentencepiece = pytest.importorskip("sentencepiece")
    options: dict[str, dict[str, Any]] = {
        "llama": {"model_type": "bpe", "byte_fallback": True},
        "gemma": {
            "model_type": "bpe",
            "byte_fallback": True,
            "add_dummy_prefix": False,
            "user_defined_symbols": ["\u2581\u2581", "\u2581\u2581\u2581", "\n\n", "\n", "<mask>"],
        },
        "unknowns": {"model_type": "bpe"},
        "one_space": {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": True},
        "unigram": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
        "unigram_bytes": {"model_type": "unigram", "byte_fallback": True},
    }
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((CORPUS[0] + CORPUS[1] + CORPUS[6]).splitlines() * 4),
        model_writer=out,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"vocab_size": 420 if options[kind].get("byte_fallback") else 120, **plain, **options[kind]},
    )
    return out.getvalue()


def sentencepiece_folder(folder: Path, data: bytes, **config: Any) -> Path:
    (folder / "tokenizer.model").write_bytes(data)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gemma", "unknowns", "one_space", "unigram", "unigram_bytes"])
def test_agreement_with_sentencepiece(kind: str, legacy: bool, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    oracle = sentencepiece.SentencePieceProcessor(model_proto=trained(kind))
    tokenizer = Tokenizer(sentencepiece_folder(tmp_path, trained(kind), legacy=legacy))
    assert len(tokenizer) == oracle.vocab_size()
    assert (tokenizer.bos_id, tokenizer.eos_id) == (oracle.bos_id(), oracle.eos_id())

    # `tokenizers` has its own notion of NFKC with combining characters.
    texts = st.text(" \n\t'0aZé漢", max_size=40) if kind == "unigram" else ANY_TEXT

    @settings(max_examples=150)
    @given(texts)
    def check(text: str) -> None:
        expected = oracle.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        if oracle.unk_id() not in expected:
            assert tokenizer.decode(expected) == stream(tokenizer, expected) == oracle.decode(expected)

    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text), text
    check()


def test_the_beginning_of_a_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(sentencepiece_folder(tmp_path, trained("llama")))
    plain = tokenizer.encode("Once", add_special_tokens=False)
    assert tokenizer.encode("Once") == [1, *plain]
    assert tokenizer.encode("<s>Once") == [1, *plain]
    assert Tokenizer(sentencepiece_folder(tmp_path, trained("llama"), add_bos_token=False)).encode("Once") == plain
    newer = Tokenizer(sentencepiece_folder(tmp_path, trained("llama"), legacy=False))
    assert newer.encode("Once") == [1, *plain]
    assert newer.encode("<s> Once") == [1, *plain]  # no space is added after a special token


def test_added_tokens_of_the_configuration(tmp_path: Path) -> None:
    size = Tokenizer(sentencepiece_folder(tmp_path, trained("llama"))).bytes.__len__()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|user|>": size, "<|end|>": size + 1}))
    flags = {"content": "<|end|>", "special": True, "rstrip": True}
    tokenizer = Tokenizer(
        sentencepiece_folder(
            tmp_path, trained("llama"), added_tokens_decoder={str(size + 1): flags}, eos_token="<|end|>"
        )
    )
    assert tokenizer.encode("<|user|><|end|>  ", add_special_tokens=False) == [size, size + 1]
    assert tokenizer.eos_id == size + 1
    assert tokenizer.decode([size, size + 1]) == "<|user|>"


def test_a_model_with_such_a_tokenizer(tmp_path: Path) -> None:
    for file in (SHIPPED / "stories260k").iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    llm = LLM(sentencepiece_folder(tmp_path, trained("llama")), kv_cache_memory_bytes="8MiB")
    (answer,) = llm.generate("Once upon", SamplingParams(temperature=0.0, max_tokens=8))
    assert answer.prompt_token_ids == Tokenizer(tmp_path).encode("Once upon")
    assert len(answer.outputs[0].token_ids) == 8


# tiktoken, tekken.json


@cache
def ranks() -> list[bytes]:
    """Byte pairs of a trainer, in the order of their ranks."""
    cut = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(GPT4_PATTERN), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = cut
    model.train_from_iterator([*CORPUS, *CORPUS, " " * 40], trainer)
    alphabet = byte_level_alphabet()
    merged = [token for token, _ in sorted(model.get_vocab().items(), key=lambda item: item[1]) if len(token) > 1]
    return [*(bytes([byte]) for byte in range(256)), *(bytes(alphabet[letter] for letter in token) for token in merged)]


SPECIAL = ("<|begin|>", "<|end|>")
BIG_PATTERNS = {"llama3": tiktoken_files._LLAMA3, "o200k": tiktoken_files._O200K, "kimi": tiktoken_files._KIMI}


def tiktoken_file(folder: Path, name: str = "tokenizer.model") -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks())]
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def family(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    small = tiktoken_files._Family("small", pattern, SPECIAL, (4, "<|reserved_{}|>"), *SPECIAL)
    monkeypatch.setattr(tiktoken_files, "_FAMILIES", {len(ranks()): small})


@pytest.mark.parametrize("pattern", BIG_PATTERNS.values(), ids=BIG_PATTERNS.keys())
def test_agreement_with_tiktoken(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    family(monkeypatch, pattern)
    size = len(ranks())
    special = {**dict(zip(SPECIAL, range(size, size + 2), strict=True)), f"<|reserved_{size + 2}|>": size + 2}
    oracle = tiktoken.Encoding(
        "test",
        pat_str=pattern,
        mergeable_ranks={token: rank for rank, token in enumerate(ranks())},
        special_tokens=special,
    )
    tokenizer = Tokenizer(tiktoken_file(tmp_path))
    assert len(tokenizer) == size + 4
    assert (tokenizer.bos_id, tokenizer.eos_id) == (size, size + 1)

    @settings(max_examples=300)
    @given(ANY_TEXT)
    def check(text: str) -> None:
        expected = oracle.encode(text, allowed_special="all")
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == stream(tokenizer, expected) == text

    @given(st.lists(st.integers(0, size - 1), max_size=12))
    def check_decoding(tokens: list[int]) -> None:
        assert tokenizer.decode(tokens) == stream(tokenizer, tokens) == oracle.decode(tokens)  # invalid UTF-8, too

    for text in [*TEXTS, "<|begin|>Hi<|end|>", f"<|reserved_{size + 2}|>"]:
        assert tokenizer.encode(text) == oracle.encode(text, allowed_special="all"), text
    check()
    check_decoding()


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model", "qwen.tiktoken"])
def test_names_of_tiktoken_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family(monkeypatch, GPT4_PATTERN)
    config = {"added_tokens_decoder": {str(len(ranks()) + 1): {"content": "<|stop|>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|stop|>"}))
    tokenizer = Tokenizer(tiktoken_file(tmp_path, name))
    assert tokenizer.eos_id == len(ranks()) + 1
    assert tokenizer.decode([tokenizer.eos_id, 65]) == "A"


def test_a_long_token_of_tiktoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To split it at every place would take the square of its length."""
    family(monkeypatch, GPT4_PATTERN)
    tokens = [*ranks()[:-1], b"a" * 5000]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (tmp_path / "tokenizer.model").write_text("\n".join(lines))
    with pytest.raises(InputError, match=rf"tokenizer\.model: token {len(tokens) - 1} has 5000 bytes; at most 4096"):
        Tokenizer(tmp_path)


def tekken(special: list[dict[str, Any]] | None, tokens: list[bytes], reserved: int = 20) -> dict[str, Any]:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    config = {
        "pattern": BIG_PATTERNS["o200k"],
        "default_vocab_size": len(tokens) + reserved - 7,  # the file may have more
        "default_num_special_tokens": reserved,
        "num_vocab_tokens": len(tokens),
        "version": "v3",
    }
    return {"config": config, "vocab": vocab, **({} if special is None else {"special_tokens": special})}


def test_agreement_with_tiktoken_on_tekken(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    listed = [{"rank": 2, "token_str": "</s>", "is_control": True}, {"rank": 1, "token_str": "<s>"}]
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(listed, ranks())))
    tokenizer = Tokenizer(tmp_path)
    kept = ranks()[:-7]
    oracle = tiktoken.Encoding(
        "test",
        pat_str=BIG_PATTERNS["o200k"],
        mergeable_ranks={token: rank for rank, token in enumerate(kept)},
        special_tokens={},
    )
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *(20 + token for token in oracle.encode(text))], text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<s>a</s><SPECIAL_3>") == [1, tokenizer.encode("a")[1], 2, 3]
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(None, ranks())))
    assert Tokenizer(tmp_path).encode("[INST]a[/INST]") == [1, 3, tokenizer.encode("a")[1], 4]


def test_the_pattern_of_tekken_json_counts_beside_a_tokenizer_json(tmp_path: Path) -> None:
    """Copies of Mistral Small 3.1 and 3.2 have a tokenizer.json that cuts texts by another pattern."""
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(None, ranks())))
    right = Tokenizer(tmp_path)
    text = "HTTPServer 1234567 doesn't"
    description = read_description(tmp_path, {}).json
    (split, _) = description["pre_tokenizer"]["pretokenizers"]
    split["pattern"]["Regex"] = r"\s+|\S"
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    both = Tokenizer(tmp_path)
    assert both.pattern_file == "tekken.json"
    assert both.encode(text, add_special_tokens=False) == right.encode(text, add_special_tokens=False)
    other = [*ranks()[:300], *ranks()[300:][::-1]]  # another model's
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(None, other)))
    wrong = Tokenizer(tmp_path)
    assert wrong.pattern_file == ""
    assert wrong.encode(text, add_special_tokens=False) != right.encode(text, add_special_tokens=False)


# vocab.json and merges.txt


def vocab_and_merges(folder: Path) -> Path:
    trainer = tokenizers.ByteLevelBPETokenizer()
    trainer.train_from_iterator(
        [*CORPUS, *CORPUS], vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False
    )
    trainer.save_model(str(folder))
    return folder


def test_agreement_with_gpt2(tmp_path: Path) -> None:
    tokenizer = Tokenizer(vocab_and_merges(tmp_path))
    oracle = tokenizers.ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    for text in TEXTS:
        assert tokenizer.encode(text) == oracle.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a<|endoftext|>")[-1] == tokenizer.eos_id == tokenizer.bos_id


def test_the_class_of_a_tokenizer_cuts_texts(tmp_path: Path) -> None:
    vocab_and_merges(tmp_path)
    gpt2 = Tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    qwen = Tokenizer(tmp_path)
    assert qwen.encode("e\u0301") == gpt2.encode("\u00e9") != gpt2.encode("e\u0301")  # NFC
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2TokenizerFast"}')
    assert Tokenizer(tmp_path).encode("e\u0301") == qwen.encode("e\u0301")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    with pytest.raises(InputError, match=r"'BertTokenizer'.*GPT2Tokenizer, CodeGenTokenizer, Qwen2Tokenizer"):
        Tokenizer(tmp_path)


# Files that are not what they should be


def field(number: int, value: bytes | int) -> bytes:
    """One field of a protobuf message."""
    if isinstance(value, int):
        return bytes([number << 3 & 0x7F | 0x80, number >> 4, value])
    size, length = b"", len(value)
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + value


def piece(text: str, kind: int) -> bytes:
    return field(1, field(1, text.encode()) + bytes([0x15]) + struct.pack("<f", 0.0) + bytes([0x18, kind]))


BAD: dict[str, tuple[str, bytes, str]] = {
    "empty": ("tokenizer.model", b"", "no pieces"),
    "garbage": ("tokenizer.model", b"\xff" * 40, "not a SentencePiece model"),
    "cut off": ("tokenizer.model", piece("<unk>", 2)[:-3], "not a SentencePiece model"),
    "not UTF-8": ("tokenizer.model", field(1, field(1, b"\xff")), "not a SentencePiece model"),
    "twice": ("tokenizer.model", piece("a", 1) * 2, "same piece twice"),
    "a long piece": (
        "tokenizer.model",
        piece("<unk>", 2) + piece("é" * 2500, 1) + field(2, b"\x18\x02"),
        r"tokenizer\.model: token 1 has 5000 bytes; at most 4096",
    ),
    "a long token": (
        "tekken.json",
        json.dumps(tekken(None, [*ranks()[:300], b"a" * 5000, *ranks()[301:]])).encode(),
        r"tekken\.json: token 300 has 5000 bytes; at most 4096",
    ),
    "words": ("tokenizer.model", piece("<unk>", 2) + field(2, b"\x18\x03"), "type 3"),
    "pointer": (
        "tokenizer.model",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 499723\n",
        "is a Git LFS pointer, not the file itself: run git lfs pull",
    ),
    "unknown family": ("tokenizer.model", b"IQ== 0\nIg== 1\n", "2 tokens, which is none of the known vocabularies"),
    "no rank": ("x.tiktoken", b"IQ== 0\nIg==\n", "line 2 is no token"),
    "a gap": ("tiktoken.model", b"IQ== 0\nIg== 2\n", "not 0 to 1"),
    "no pattern": ("tekken.json", b'{"config": {}}', r"config\.pattern is None"),
    "few tokens": (
        "tekken.json",
        json.dumps(tekken(None, [b"a"])).encode(),
        r"has 1 tokens in vocab; its config names -6 in addition",
    ),
    "no base64": (
        "tekken.json",
        json.dumps(tekken(None, ranks()) | {"vocab": [{"rank": 0, "token_bytes": "%"}] * 600}).encode(),
        "no token of rank 0",
    ),
    "special": (
        "tekken.json",
        json.dumps(tekken([{"rank": 99, "token_str": "x"}], ranks())).encode(),
        "not a rank below 20",
    ),
    "no merges": ("vocab.json", b'{"a": 0}', r"neither merges\.txt nor tokenizer\.json"),
}


@pytest.mark.parametrize(("name", "data", "message"), BAD.values(), ids=BAD.keys())
def test_a_damaged_file_is_one_clear_error(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        Tokenizer(tmp_path)
    assert str(caught.value).isprintable()


@given(data=st.binary(max_size=60))
def test_any_bytes_as_a_sentencepiece_model(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.model").write_bytes(data)
    with pytest.raises(InputError):
        Tokenizer(folder)


def test_merges_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(InputError, match="line 2: 'a b' does not join two tokens"):
        Tokenizer(tmp_path)
