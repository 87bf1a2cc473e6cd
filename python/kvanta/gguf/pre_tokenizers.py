"""tokenizer.ggml.pre: how text is cut before byte-pair merges, by the names that llama.cpp's conversion writes.

The patterns are those of the models' own tokenizer.json files, in the syntax of the `tokenizers` package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_GPT2_SPLIT: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_SINGLE_DIGITS: Json = {"type": "Digits", "individual_digits": True}


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")


def _words(digits: str, contractions: str = _CONTRACTIONS, marks: str = "", punctuation_end: str = r"[\r\n]*") -> Json:
    """Words with the character before them, runs of `digits`, punctuation, spaces: the family of cl100k."""
    return _split(
        "|".join(
            [
                contractions,
                rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{marks}]+",
                digits,
                rf" ?[^\s\p{{L}}{marks}\p{{N}}]+{punctuation_end}",
                *_SPACES,
            ]
        )
    )


def _cased_words(digits: str, contractions: str = "", without: str = "", punctuation_end: str = r"[\r\n/]*") -> str:
    """Words cut where lower case turns to upper case: the family of o200k. `without`: characters of no word."""
    before = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]",
    )
    words = [f"{before}{upper}*{lower}+{contractions}", f"{before}{upper}+{lower}*{contractions}"]
    return "|".join([*words, digits, rf" ?[^\s\p{{L}}\p{{N}}]+{punctuation_end}", *_SPACES])


_LLAMA3 = [_words(r"\p{N}{1,3}"), _BYTES_ONLY]
_QWEN2 = [_words(r"\p{N}"), _BYTES_ONLY]
_O200K = [_split(_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")), _BYTES_ONLY]
_DIGITS_THEN_GPT2 = [_SINGLE_DIGITS, _GPT2_SPLIT]
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

_DEEPSEEK3 = [
    _split(r"\p{N}{1,3}"),
    _split(_HAN_AND_KANA),
    _split(
        "|".join(
            [
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
                r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
                r" ?[\p{P}\p{S}]+[\r\n]*",
                *_SPACES,
            ]
        )
    ),
    _BYTES_ONLY,
]
# Digits in threes from the right, then scripts without spaces between words.
_AFMOE = [
    _split(r"\d{1,3}(?=(?:\d{3})*(?!\d))"),
    _split(
        "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
        "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff"
        "\uac00-\ud7af\u1100-\u11ff]+"
    ),
    _DEEPSEEK3[2],
    _BYTES_ONLY,
]
# Letters that have a case, by their classes; the model's own file lists them.
_DEEPSEEK_LLM = [
    _split(r"[\r\n]"),
    _split(r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"),
    _split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    _split(r"\s+$"),
    _split(_HAN_AND_HANGUL),
    _SINGLE_DIGITS,
    _BYTES_ONLY,
]
_DEEPSEEK_CODER = [
    _split(r"[\r\n]"),
    _split(r"\s?\p{L}+"),
    _split(r"\s?\p{P}+"),
    _split(_HAN_AND_HANGUL),
    _SINGLE_DIGITS,
    _BYTES_ONLY,
]
_KIMI_K2 = [
    _split(r"[\p{Han}]+|" + _cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?", r"&&[^\p{Han}]", r"[\r\n]*")),
    _BYTES_ONLY,
]
# Words with marks, and phrases of words with one space between them.
_EXAONE_MOE = [
    _split(
        "|".join(
            [
                _CONTRACTIONS,
                r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                r"\p{N}",
                r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                r"\s*[\r\n]",
                *_SPACES[1:],
            ]
        )
    ),
    _BYTES_ONLY,
]
_YOUTU = [
    _split(
        "[\uac00-\ud7a3\u3131-\u318e]+"
        "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
        f"|[\u3105-\u312f]+|{_HAN_AND_KANA}"
    ),
    _split(_cased_words(r"\p{N}", f"{_CONTRACTIONS}?")),
    _BYTES_ONLY,
]
_BLOOM = _split(" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+")
_BAILING = [
    _split(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"),
    _BYTES_ONLY,
]
_SUPERBPE = [_split(r"\p{N}+"), _split(r"(?=(\d{3})+(?!\d))"), _BYTES_ONLY]
_FALCON = [_split(r"[\p{P}\$\+<=>\^~\|`]+"), _GPT2_SPLIT, _split("[0-9][0-9][0-9]")]


@dataclass(frozen=True)
class PreTokenizer:
    """Steps of `tokenizers`, and what else the name says."""

    steps: Sequence[Json]
    nfc: bool = False
    """Text is normalized."""
    whole_words_first: bool = False
    """A word that is in the vocabulary is taken without merges."""
    adds_bos: bool = False
    """Default where the file does not say."""

    def json(self) -> Json:
        """The pre_tokenizer of tokenizer.json."""
        steps = list(self.steps)
        return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


_NAMES = {
    "bloom gpt3-finnish poro-chat": PreTokenizer([_BLOOM, _BYTES_ONLY]),
    "viking": PreTokenizer([_BLOOM, _split(r"\p{N}"), _BYTES_ONLY]),
    "superbpe": PreTokenizer(_SUPERBPE),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(_BAILING),
    "default gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4": PreTokenizer(
        [_GPT2_SPLIT]
    ),
    "roberta-bpe": PreTokenizer([_GPT2_SPLIT]),
    "smollm starcoder refact command-r codeshell exaone minerva-7b": PreTokenizer(_DIGITS_THEN_GPT2),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        _LLAMA3, whole_words_first=True, adds_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer(_LLAMA3),
    "glm4 glm-dsa": PreTokenizer(_LLAMA3, whole_words_first=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2": PreTokenizer(_QWEN2, nfc=True),
    "stablelm2 hunyuan solar-open grok-2": PreTokenizer(_QWEN2),
    "qwen35": PreTokenizer([_words(r"\p{N}", marks=r"\p{M}"), _BYTES_ONLY], nfc=True),
    "gpt-4o o200k llama4 kanana2 minimax-m2": PreTokenizer(_O200K),
    "tekken": PreTokenizer([_split(_cased_words(r"\p{N}")), _BYTES_ONLY], whole_words_first=True, adds_bos=True),
    "deepseek-v3 hunyuan-dense": PreTokenizer(_DEEPSEEK3),
    "afmoe": PreTokenizer(_AFMOE),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "kimi-k2": PreTokenizer(_KIMI_K2),
    "exaone-moe": PreTokenizer(_EXAONE_MOE),
    "seed-coder": PreTokenizer([_words(r"\p{N}", punctuation_end=""), _BYTES_ONLY]),
    "youtu": PreTokenizer(_YOUTU, whole_words_first=True),
    "falcon": PreTokenizer(_FALCON),
}
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: kind for names, kind in _NAMES.items() for name in names.split()}
