"""Chat templates of model families, with tokenizers of bytes that have their special tokens."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from megarl.data.tokenizer import Tokenizer

Call = tuple[str, Mapping[str, Any]]

HERMES = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '' if loop.first and not message.content else '\n' }}<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>"
    "{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>\n\n"
    "{% if loop.first %}{% for tool in tools or [] %}{{ tool | tojson }}\n\n{% endfor %}{% endif %}"
    "{% if message.tool_calls %}{% if message.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}"
    "{% endif %}{% set call = message.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% elif message.role == 'tool' %}{{ message.content | tojson }}{% else %}{{ message.content | trim }}{% endif %}"
    "<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
"""Those of Hermes, Llama 3, Gemma and Mistral write what the families' own do, apart from the descriptions of tools."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family.

    Args:
        template: a file in templates/, or the template.
        ends: tokens that end turns, the tokenizer's first.
        said: the text of a turn that the model's template would write for a content.
        called: the same for calls of tools; None for a family whose calls are not read.
        thought: the same for thoughts and a content.
    """

    template: str
    specials: Sequence[str]
    ends: Sequence[str]
    begin: str | None = None
    said: Callable[[str], str] = lambda content: content
    called: Callable[[Sequence[Call]], str] | None = None
    thought: Callable[[str, str], str] | None = None
    tool_end: str | None = None


def _json_calls(calls: Sequence[Call]) -> str:
    texts = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def _xml_calls(calls: Sequence[Call]) -> str:
    text = ""
    for name, arguments in calls:
        values = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
        text += f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>\n"
    return text.removesuffix("\n")


def _bare_call(calls: Sequence[Call]) -> str:
    ((name, arguments),) = calls
    return f'{{"name": "{name}", "parameters": {json.dumps(dict(arguments), ensure_ascii=False)}}}'


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THOUGHTS = ("<think>", "</think>")
_IMAGES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_DEEPSEEK = [
    f"<\uff5c{name}\uff5c>"
    for name in (
        *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant"),
        *(f"tool▁{what}▁{where}" for what in ("calls", "call", "outputs", "output") for where in ("begin", "end")),
        "tool▁sep",
    )
]

FAMILIES: Mapping[str, Family] = {
    "qwen2.5": Family(
        template="qwen2_5", specials=(*_CHATML, *_CALLS), ends=("<|im_end|>", "<|endoftext|>"), called=_json_calls
    ),
    "qwen3": Family(
        template="qwen3",
        specials=(*_CHATML, *_CALLS, *_THOUGHTS),
        ends=("<|im_end|>", "<|endoftext|>"),
        called=_json_calls,
        thought=lambda thoughts, content: f"<think>\n{thoughts}\n</think>\n\n{content}",
    ),
    "qwen3-2507": Family(
        template="qwen3_instruct_2507",
        specials=(*_CHATML, *_CALLS, *_THOUGHTS),
        ends=("<|im_end|>", "<|endoftext|>"),
        called=_json_calls,
    ),
    "qwen3.5": Family(
        template="qwen3_5_think",
        specials=(*_CHATML, *_CALLS, *_THOUGHTS, *_IMAGES),
        ends=("<|im_end|>", "<|endoftext|>"),
        said=lambda content: f"\n</think>\n\n{content}",
        called=lambda calls: f"\n</think>\n\n{_xml_calls(calls)}",
        thought=lambda thoughts, content: f"{thoughts}\n</think>\n\n{content}",
    ),
    "hermes": Family(
        template=HERMES,
        specials=("<s>", *_CHATML),
        ends=("<|im_end|>",),
        begin="<s>",
        called=_json_calls,
    ),
    "llama3": Family(
        template=LLAMA,
        specials=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        ends=("<|eot_id|>", "<|eom_id|>"),
        begin="<|begin_of_text|>",
        called=_bare_call,
    ),
    "deepseek-r1": Family(
        template="deepseek_r1_distill",
        specials=(*_DEEPSEEK, *_THOUGHTS),
        ends=(_DEEPSEEK[1],),
        begin=_DEEPSEEK[0],
        said=lambda content: f"\n</think>\n\n{content}",
        thought=lambda thoughts, content: f"{thoughts}\n</think>\n\n{content}",
    ),
    "phi3": Family(
        template="phi3",
        specials=("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ends=("<|end|>", "<|endoftext|>"),
    ),
    "glm4.5": Family(
        template="glm4moe",
        specials=(
            *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            *(*_CALLS, *_THOUGHTS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        ends=("<|user|>", "<|endoftext|>", "<|observation|>"),
        said=lambda content: f"\n<think></think>\n{content}",
        thought=lambda thoughts, content: f"\n<think>{thoughts}</think>\n{content}",
        tool_end="<|observation|>",
    ),
    "gemma": Family(
        template=GEMMA,
        specials=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        ends=("<end_of_turn>", "<eos>"),
        begin="<bos>",
    ),
    "mistral": Family(
        template=MISTRAL,
        specials=("<s>", "</s>", "[INST]", "[/INST]"),
        ends=("</s>",),
        begin="<s>",
        said=lambda content: f" {content}",
    ),
    "gpt-oss": Family(
        template="gptoss",
        specials=(
            *("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
            "<|constrain|>",
        ),
        ends=("<|return|>", "<|call|>"),
        said=lambda content: f"<|channel|>final<|message|>{content}",
    ),
}


@functools.cache
def tokenizer(name: str, eats: bool = False) -> Tokenizer:
    """A tokenizer of bytes, and of pairs of line breaks, that has a family's special tokens and template.

    Args:
        eats: its special tokens take the white space after them, as Phi-3's.
    """
    family = FAMILIES[name]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, "ĊĊ"])}
    backend = Backend(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(special, rstrip=eats, special=True) for special in family.specials])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=family.begin, eos_token=family.ends[0])
    file = Path(__file__).parent / "templates" / f"{family.template}.jinja"
    hf.chat_template = family.template if "{" in family.template else file.read_text()
    with tempfile.TemporaryDirectory() as directory:
        hf.save_pretrained(directory)
        return Tokenizer(PreTrainedTokenizerFast.from_pretrained(directory), name)


def end_ids(name: str) -> list[int]:
    """The ids of the tokens that end a family's turns."""
    return [int(tokenizer(name).hf.convert_tokens_to_ids(end)) for end in FAMILIES[name].ends]
