"""Tokenization of prompts, chats and responses."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.schema import Model
from megarl.data.sources import UnusableRowError
from megarl.files import format_bytes
from megarl.lazy_compiling import distributions_by_records

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A directory with a tokenizer has at least one of these."""
_READ = (".json", ".jinja", ".model", ".txt")
_LONGEST_REASON = 500
LARGEST_FILE = 256 << 20
"""Bytes of a tokenizer's file; those of the largest vocabularies have 40 MB."""

Message = Mapping[str, Any]
"""Role, content, and other keys that chat templates read."""


class TextTooLongError(UnusableRowError):
    """A text or a chat cannot fit into a limit of tokens."""

    def __init__(self, what: str, tokens: int, limit: int) -> None:
        super().__init__("too_long", f"{what} cannot fit into {limit} tokens", tokens)


class Tokenizer:
    """A Hugging Face tokenizer that places special tokens as rollouts do.

    A prompt starts with the tokenizer's begin token, if it has one. A chat is exactly what its
    template writes. A response starts with no special token and ends with the end token, once.

    Args:
        name: name in messages.

    Raises:
        ValueError: it is not a fast tokenizer, has no end token, or ends prompts with one.
    """

    def __init__(self, hf: PreTrainedTokenizerBase, name: str) -> None:
        if not hf.is_fast:
            raise ValueError(f"{name}: {type(hf).__name__} has no tokenizer.json, which is needed")
        # Its own encode takes a third of the wrapper's time on short texts: it makes no masks.
        self._backend: Backend = hf.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        self._backend.no_truncation()
        self._backend.no_padding()
        self.hf = hf
        self._name = name
        if not isinstance(hf.eos_token_id, int):
            raise ValueError(f"{name}: the tokenizer names no end token; set eos_token in tokenizer_config.json")
        self.end_token_id = hf.eos_token_id
        vocabulary = hf.get_vocab()
        self._ids = max(vocabulary.values(), default=-1) + 1
        self._longest = max(map(len, vocabulary), default=1)
        self._max_tokens: int | None = None
        if self._encode("a", special=True)[-1:] == [self.end_token_id]:
            raise ValueError(f"{name}: the tokenizer ends every text; set add_eos_token to false, as prompts continue")

    def __len__(self) -> int:
        """The largest id plus 1."""
        return self._ids

    def limited(self, tokens: int) -> Tokenizer:
        """Returns this tokenizer for texts and chats of at most so many tokens.

        Of longer ones, those that are more than so many times the longest token raise
        TextTooLongError before they are encoded: encoding takes about a second and
        400 MB for 1 MB of text.
        """
        limited = copy.copy(self)
        limited._max_tokens = max(tokens, 0)
        return limited

    @property
    def has_chat_template(self) -> bool:
        return self.hf.chat_template is not None

    def check(self, *, vocab_size: int, chat_template: bool = False, template_arguments: Collection[str] = ()) -> None:
        """Raises ValueError if ids exceed the model's, or no chat template reads the arguments."""
        if len(self) > vocab_size:
            rule = f"the tokenizer has ids up to {len(self) - 1}, the model's in use end at {vocab_size - 1}"
            raise ValueError(f"{self._name}: {rule}")
        if (chat_template or template_arguments) and not self.has_chat_template:
            raise ValueError(f"{self._name}: the tokenizer has no chat template")
        for name in template_arguments:
            if re.search(rf"\b{re.escape(name)}\b", str(self.hf.chat_template)) is None:
                raise ValueError(f"{self._name}: the chat template does not read {name!r}, of chat_template_kwargs")

    def encode(self, text: str) -> list[int]:
        """Encodes a prompt."""
        begun = self.hf.bos_token is not None and text.startswith(str(self.hf.bos_token))
        return self._encode(text, special=not begun)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Encodes a chat and the template's start of the answer.

        Args:
            tools: descriptions of tools, for the template.
            arguments: further arguments of the template.

        Raises:
            TextTooLongError: see `limited`.
            ValueError: the template refuses the chat, or ignores the tools, their
                calls or their answers.
        """
        self.check_length(messages)
        if not self.has_chat_template:
            reason = f"a chat needs a chat template, and the tokenizer of {self._name} has none"
            raise ValueError(f"{reason}; take an instruct model, or write the prompt as a text")
        chat = [dict(message) for message in messages]
        try:
            text = self.written(chat, tools, arguments or {})
        except Exception as error:  # whatever the expressions of a template raise
            raise ValueError(f"the chat template refuses the chat: {str(error)[:_LONGEST_REASON]}") from error
        without_calls = [dict(message) for message in chat]
        for message in without_calls:
            message.pop("tool_calls", None)
        without_answers = [message for message in chat if message["role"] != "tool"]
        reduced = {
            "the column tools": (chat, None),
            "tool_calls": (without_calls, tools),
            "messages of the role tool": (without_answers, tools),
        }
        for what, (other, offered) in reduced.items():
            if (other, offered) == (chat, tools):
                continue
            same = False
            with suppress(Exception):  # the template needs them
                same = self.written(other, offered, arguments or {}) == text
            if same:
                raise ValueError(f"the chat template ignores {what}: remove them, or choose another tokenizer")
        return self._encode(text, special=False)

    def check_length(self, chat: Sequence[Message]) -> None:
        """Raises TextTooLongError if a chat is sure not to fit, the model's messages left out."""
        if self._max_tokens is not None and len(chat) > self._max_tokens:
            raise TextTooLongError(f"{len(chat)} messages", len(chat), self._max_tokens)
        characters = 0
        for message in chat:
            content = message.get("content")
            if isinstance(content, str) and message["role"] != "assistant":
                characters += len(content)
        self._check_characters(characters)

    def written(
        self,
        chat: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
        *,
        answer: bool = True,
    ) -> str:
        """Returns what the chat template writes; with `answer`, up to the start of an answer."""
        messages = [dict(message) for message in chat]
        offered: Any = tools and [dict(tool) for tool in tools]
        text = self.hf.apply_chat_template(
            messages, tools=offered, tokenize=False, add_generation_prompt=answer, **arguments
        )
        return str(text)

    def continuation(self, text: str) -> list[int]:
        """Encodes a text that follows other tokens, without special tokens of its own."""
        return self._encode(text, special=False)

    def respond(self, text: str) -> list[int]:
        """Encodes a response and the end token; raises ValueError if the text contains that."""
        ids = self._encode(text, special=False)
        if ids[-1:] != [self.end_token_id]:
            ids.append(self.end_token_id)
        if self.end_token_id in ids[:-1]:
            raise ValueError("a response must not continue after its end token")
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decodes ids, with or without special tokens."""
        text = self.hf.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _encode(self, text: str, *, special: bool) -> list[int]:
        self._check_characters(len(text))
        with _rust_errors(f"{self._name}: the tokenizer cannot encode a text"):
            # A batch, other than a single text, is encoded without the interpreter's lock.
            return self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def _check_characters(self, characters: int) -> None:
        if self._max_tokens is not None and characters > self._max_tokens * self._longest:
            least = math.ceil(characters / self._longest)
            raise TextTooLongError(f"{characters} characters", least, self._max_tokens)


@contextmanager
def _rust_errors(what: str) -> Iterator[None]:
    """Raises ValueError for what the tokenizers library raises, also a panic, no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error) or type(error).__name__
        raise ValueError(f"{what}: {reason[:_LONGEST_REASON]}") from error


def has_tokenizer(directory: str | Path) -> bool:
    return any((Path(directory) / name).exists() for name in _FILES)


def model_tokenizer(model: Model) -> Tokenizer | None:
    """Loads the configured tokenizer, else the model's, if any; see `load_tokenizer`."""
    if model.tokenizer is not None:
        return load_tokenizer(model.tokenizer)
    if model.path is not None and has_tokenizer(model.path):
        return load_tokenizer(model.path)
    return None


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face directory; raises ValueError if it cannot be used."""
    if not has_tokenizer(directory):
        raise ValueError(f"{directory}: no tokenizer is there: none of {', '.join(_FILES)}")
    for file in Path(directory).iterdir():
        if file.suffix in _READ and (not file.is_file() or file.stat().st_size > LARGEST_FILE):
            rule = f"is no regular file of at most {format_bytes(LARGEST_FILE)}"
            raise ValueError(f"{directory}: the tokenizer cannot be loaded: {file.name} {rule}")
    with distributions_by_records():
        from transformers import AutoTokenizer

    with _rust_errors(f"{directory}: the tokenizer cannot be loaded"):
        hf = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    return Tokenizer(hf, str(directory))
