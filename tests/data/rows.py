"""Tokenizers and files of rows for the data tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megarl.config.schema import SourceFields
from megarl.data.encoding import Encoder
from megarl.data.sources import Rows
from megarl.data.tokenizer import Tokenizer as MegaTokenizer
from megarl.data.training_texts import TrainingText

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Without a token for the beginning, as Qwen2's."""

LLAMA = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if loop.index0 % 2 != (message['role'] == 'assistant') | int %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['name'] is defined %}{{ message['name'] + ': ' }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST]' + message['content'] + '[/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
"""With one, as Llama's; it refuses some chats."""

TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools\n' }}{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ 'call:' + call['function']['name'] }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
)
"""Writes tools, their calls and their answers, and reads an argument, as Qwen3's does."""

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n.,:;!?+-=*/()[]|<>_'\""


def chatml_tokenizer(directory: Path) -> Path:
    """Characters as tokens, no token for the beginning, and a chat template."""
    return letter_tokenizer(directory, ["<|im_start|>", "<|im_end|>"], CHATML, eos_token="<|im_end|>")


def tools_tokenizer(directory: Path) -> Path:
    """Like `chatml_tokenizer`, with a template for tools."""
    return letter_tokenizer(directory, ["<|im_start|>", "<|im_end|>"], TOOLS, eos_token="<|im_end|>")


def llama_tokenizer(directory: Path, *, template: str | None = LLAMA, ends: bool = False) -> Path:
    """Characters as tokens, and ``<s>`` before every text; with ``ends``, ``</s>`` after it."""
    single = "<s> $A </s>" if ends else "<s> $A"
    specials = ["<s>", "</s>"]
    return letter_tokenizer(directory, specials, template, single=single, bos_token="<s>", eos_token="</s>")


def letter_tokenizer(
    directory: Path,
    specials: list[str],
    template: str | None,
    letters: str = LETTERS,
    single: str | None = None,
    **named: str,
) -> Path:
    """Writes a tokenizer whose tokens are special ones and characters.

    Args:
        single: how it writes a text, in the format of `tokenizers`.
        named: its own names of special tokens.
    """
    vocabulary = {token: index for index, token in enumerate([*specials, "<unk>", *letters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(specials)
    if single is not None:
        pairs = [(token, vocabulary[token]) for token in specials]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=pairs)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **named)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def transformers_own(directory: Path) -> Any:
    """The tokenizer as loaded by transformers."""
    return AutoTokenizer.from_pretrained(directory)


def encoder(tokenizer: MegaTokenizer | None = None, **changes: Any) -> Encoder:
    return Encoder(tokenizer, **{"vocab_size": 1000, "chat_template": False, "max_tokens": 100, **changes})


def token_lists(found: Rows[TrainingText]) -> tuple[list[tuple[Any, ...]], list[tuple[int, str]]]:
    """Key, prompt and responses of each text, and the lines that were left out, with their faults."""
    assert {array.dtype.name for text in found.items for array in (text.prompt_ids, *text.responses)} == {"int32"}
    kept = [(text.key, text.prompt_ids.tolist(), *(ids.tolist() for ids in text.responses)) for text in found.items]
    return kept, [(int(row.where.rsplit(" ", 1)[1]), row.fault) for row in found.left_out]


def jsonl(directory: Path, rows: Sequence[Mapping[str, Any] | str], name: str = "rows.jsonl") -> SourceFields:
    """A file of rows; a row that is a string is written unchanged."""
    path = directory / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return SourceFields(path=str(path))
