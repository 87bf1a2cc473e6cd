"""The tokenizer of a model folder, through Hugging Face `tokenizers`, and its chat template."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from kvanta.errors import InputError
from kvanta.params.checks import one_line
from kvanta.text.chat_adaptation import ToolSyntax, adapted
from kvanta.text.chat_template import ChatTemplate, check_messages
from kvanta.text.chat_template_files import DEFAULT, TOOL_USE, TemplateSource, read_template_sources
from kvanta.text.detokenize import Detokenizer, TokenBytes
from kvanta.text.special_tokens import (
    add_declared_tokens,
    add_special_tokens,
    model_rows,
    read_special_texts,
    special_flags,
    special_lists,
)
from kvanta.text.tokenizer_files import TOKENIZER_JSON, read_description
from kvanta.text.tokenizer_files.files import FolderSettings, read_json, tokenizer_class

# Classes of transformers that take tokenizer.json as it is: add_bos_token does not act.
_PLAIN_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")
_CONFIG_FILE, _MAP_FILE = "tokenizer_config.json", "special_tokens_map.json"


@contextlib.contextmanager
def _input_errors(what: str) -> Iterator[None]:
    """Whatever comes out of the Rust library is the file's fault."""
    try:
        yield
    except BaseException as error:  # Rust panics arrive as BaseException
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            raise
        text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in " ".join(str(error).split()))
        raise InputError(f"{what}: {text}") from None


class Tokenizer:
    """Text to token ids and back. All errors are InputError."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        config = read_json(folder / _CONFIG_FILE)
        description = read_description(folder, config)
        self._path = path = description.path
        with _input_errors(f"{path} is not a usable tokenizer"):
            self._fast = tokenizers.Tokenizer.from_str(json.dumps(description.json))
        self._fast.no_truncation()
        self._fast.no_padding()
        special_map = read_json(folder / _MAP_FILE)
        # As in transformers, the map is older than added_tokens_decoder, and comes first where there is none.
        files = [(_CONFIG_FILE, config), (_MAP_FILE, special_map)]
        files = files if "added_tokens_decoder" in config else files[::-1]
        sources = [content for _, content in files]
        self.special_texts, places = read_special_texts(folder, *sources, description.special_texts)
        names = [*(name for name, _ in files), path.name]
        self._places = {name: names[place] for name, place in places.items()}
        self._add_tokens(folder, config, special_map, [name for name, place in places.items() if place < 2])
        self.bytes = self._token_bytes(path, description.json)
        self.longest_token = max((len(self.bytes[token]) for token in range(len(self.bytes))), default=0)  # in bytes
        add_bos = config.get("add_bos_token")
        # None: what tokenizer.json does by itself.
        acts = description.adds_bos is not None or tokenizer_class(config) not in _PLAIN_CLASSES
        self._add_bos = add_bos if isinstance(add_bos, bool) and acts else description.adds_bos
        self.pattern_file = description.pattern_file
        """The file whose pattern cuts texts, where that is not the vocabulary's."""
        stored = config.get("kvanta_warnings")
        self.warnings = [str(warning) for warning in stored] if isinstance(stored, list) else []
        """What may be wrong with the tokens of texts."""
        self._prefix_space = description.prefix_space
        self._added_texts = tuple(token.content for token in self._fast.get_added_tokens_decoder().values())
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")
        templates = read_template_sources(folder, config)
        self.chat_template = self._template_of_file(templates.get(DEFAULT))
        self.tool_template = self._template_of_file(templates.get(TOOL_USE))
        """The model's own for chats with tools."""
        self._given_template: ChatTemplate | None = None
        self.template_defaults: Mapping[str, Any] = {}
        """Variables of the chat template for chats that do not give them."""
        self.tool_syntax: ToolSyntax | None = None
        """Texts of functions and calls for chat templates that do not show them; None: there are none."""
        self.vocab = 2**31
        """Number of token ids that the model takes; it may have more than the tokenizer makes."""

    def _add_tokens(
        self, folder: Path, config: Mapping[str, Any], special_map: Mapping[str, Any], named: Sequence[str]
    ) -> None:
        """Tokens that the folder names outside the file of the vocabulary. `named`: keys of special_texts."""
        lists = special_lists(config, special_map)
        with _input_errors(f"{self._path} is not a usable tokenizer"):
            texts = [*(self.special_texts[name] for name in named), *lists]
            if self._path.name == TOKENIZER_JSON:
                add_declared_tokens(self._fast, FolderSettings.read(folder, config, texts).added)
            flags = special_flags(config, special_map)
            self.tokens_without_rows = add_special_tokens(self._fast, texts, model_rows(folder), flags)
            """Texts of special tokens that were left out, because the model has no row for them."""

    def place_of(self, name: str) -> str:
        """The file that names a special token: `eos_token`; "" for none."""
        return self._places.get(name, "")

    def _id_of(self, name: str) -> int | None:
        text = self.special_texts.get(name)
        return None if text is None else self._fast.token_to_id(text)

    def _token_bytes(self, path: Path, description: Mapping[str, Any]) -> TokenBytes:
        vocabulary = self._fast.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values(), default=-1) + 1
        if size > 16 * len(vocabulary) + 65536:
            raise InputError(f"{path} has {len(vocabulary)} tokens but ids up to {size - 1}")
        tokens: list[str | None] = [None] * size
        for token, index in vocabulary.items():
            tokens[index] = token
        added = self._fast.get_added_tokens_decoder()
        with _input_errors(f"{path} is not a usable tokenizer"):
            return TokenBytes(
                tokens,
                {index: token.content for index, token in added.items()},
                [index for index, token in added.items() if token.special],
                description.get("decoder"),
            )

    def _template_of_file(self, source: TemplateSource | None) -> ChatTemplate | None:
        return None if source is None else ChatTemplate(source.text, self.special_texts, source.place)

    @property
    def vocabulary(self) -> dict[int, str]:
        """Every token's text in the vocabulary, by id."""
        return {index: token for token, index in self._fast.get_vocab(with_added_tokens=True).items()}

    def first_difference(self, other: Tokenizer) -> int | None:
        """The smallest token id that means something else in another tokenizer; None where all are equal."""
        ours, theirs = self.vocabulary, other.vocabulary
        return min(
            (index for index in ours.keys() | theirs.keys() if ours.get(index) != theirs.get(index)), default=None
        )

    @property
    def path(self) -> Path:
        """The file of the vocabulary."""
        return self._path

    def __len__(self) -> int:
        """One more than the largest token id."""
        return len(self.bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with `add_special_tokens`, after the model's beginning-of-sequence token if it has one."""
        if not isinstance(text, str):
            raise InputError(f"a text is needed, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the text is not valid Unicode: lone surrogate at character {error.start}") from None
        if self._prefix_space and text and not text.startswith(self._added_texts):
            text = " " + text
        with _input_errors(f"{self._path} cannot encode the text"):
            # As a batch of one: only for batches does the Rust library let other threads of Python run.
            ids = list(self._fast.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)
        if add_special_tokens and self._add_bos is not None and self.bos_id is not None:
            has_bos = ids[:1] == [self.bos_id]
            if self._add_bos and not has_bos:
                ids.insert(0, self.bos_id)
            elif not self._add_bos and has_bos and not text.startswith(self.special_texts["bos_token"]):
                del ids[0]
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; ids that the tokenizer does not know are skipped."""
        detokenizer = Detokenizer(self.bytes, skip_special_tokens=skip_special_tokens, at_start=True)
        return detokenizer.add(tokens) + detokenizer.finish()

    def detokenizer(
        self, prompt: Sequence[int], *, skip_special_tokens: bool = True, shown: Collection[int] = ()
    ) -> Detokenizer:
        """Detokenizer of the text that follows `prompt`. `shown`: special tokens that are not skipped."""
        at_start = all(token in self.bytes.special for token in prompt)
        return Detokenizer(self.bytes, skip_special_tokens=skip_special_tokens, at_start=at_start, shown=shown)

    def token_id(self, text: str) -> int | None:
        """The id of the token with exactly this text; None if there is none."""
        token: int | None = self._fast.token_to_id(text)
        return token

    @property
    def bos_token_id(self) -> int | None:
        """`bos_id` under the name of transformers' tokenizers, as the next members have theirs."""
        return self.bos_id

    @property
    def eos_token_id(self) -> int | None:
        """`eos_id`."""
        return self.eos_id

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """`token_id` of one token, or of several."""
        return self.token_id(tokens) if isinstance(tokens, str) else [self.token_id(token) for token in tokens]

    def token_text(self, token: int) -> str:
        """One token by itself, for tables of log-probabilities; unfinished characters show as U+FFFD."""
        return self.bytes[token].decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tokenize: bool = False,
    ) -> str:
        """The prompt of a chat as text; encode it with add_special_tokens=False, since it has its own.

        Messages that the template would refuse or leave out are adapted to it (chat_adaptation.py).

        `chat_template`: Jinja2, instead of the model's. `tokenize`: for scripts made for transformers, False alone.
        """
        if tokenize is not False:
            raise InputError(f"tokenize must be False, got {one_line(tokenize)}: encode the text")
        template = self._template_of(tools)
        if chat_template is not None:
            template = self._compiled(chat_template)
        if template is None:
            raise InputError("this model has no chat template; give a plain prompt instead", "messages")
        check_messages(messages)
        return template.render(
            adapted(messages, template.traits, tools, self.tool_syntax),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables={**self.template_defaults, **(variables or {})},
        )

    def _compiled(self, source: str) -> ChatTemplate:
        """A template that a caller gives, again and again as a rule."""
        if self._given_template is None or self._given_template.source != source:
            self._given_template = ChatTemplate(source, self.special_texts)
        return self._given_template

    def writes_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> bool:
        """The chat template shows no functions, so that they are written into the first message."""
        template = self._template_of(tools)
        return bool(tools) and self.tool_syntax is not None and template is not None and not template.traits.reads_tools

    def _template_of(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate | None:
        return self.chat_template if tools is None else self.tool_template or self.chat_template

    def use_chat_template(self, source: str) -> None:
        """Replaces the model's own. Raises InputError if it cannot be compiled."""
        self.chat_template = ChatTemplate(source, self.special_texts)
        self.tool_template = None
