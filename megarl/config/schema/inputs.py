"""The model that a run starts from, and the data that makes its steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator

from megarl.bounds import Count, Seed
from megarl.config.schema.base import Section
from megarl.config.schema.choices import SHORTHAND


class RandomModel(Section):
    """A randomly initialised model instead of a checkpoint, for trials without one."""

    config: Mapping[str, Any]
    """Fields of the model's Hugging Face configuration; model_type chooses the architecture."""
    seed: Seed = 0
    """Seed of the weights."""


class Model(Section):
    """The model that is trained or evaluated; in PPO the reference starts as its copy, the critic from its body."""

    path: str | None = None
    """Directory of a Hugging Face checkpoint (config.json and safetensors)."""
    random: RandomModel | None = None
    """Make a random model instead; exactly one of path and random is given."""
    vocab_size: Count | None = None
    """Token ids in use: those from this number on are never sampled and have no probability; null uses all."""
    tokenizer: str | None = None
    """Directory of a Hugging Face tokenizer; null is the model's own, if its directory has one."""

    def hf_config(self) -> Mapping[str, Any]:
        """The model's Hugging Face configuration, read from its directory where it has one."""
        return self.random.config if self.random is not None else read_hf_config(self.path or "")


def read_hf_config(path: str) -> Mapping[str, Any]:
    """The config.json of a Hugging Face checkpoint directory.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a JSON object.
    """
    fields = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(f"{path}/config.json is not a JSON object")
    return cast(dict[str, Any], fields)


class SourceFields(Section):
    """Rows of data: a file, or a data set of the Hugging Face hub."""

    path: str
    """A .jsonl or .parquet file, or else the name of a Hugging Face data set, such as openai/gsm8k."""
    subset: str | None = None
    """Configuration of a Hugging Face data set."""
    split: str | None = None
    """Split of a Hugging Face data set, train for example."""
    columns: Mapping[str, str] = {}
    """Columns under other names: {prompt: question} reads the column question as prompt."""


def _as_fields(value: object) -> object:
    """A source may be given by its path alone."""
    if isinstance(value, str):
        return {"path": value}
    if not isinstance(value, Mapping):
        return value
    given = dict(cast(Mapping[object, object], value))
    return {"path": given.pop(SHORTHAND), **given} if SHORTHAND in given else given


Source = Annotated[SourceFields, BeforeValidator(_as_fields)]
LossOn = Literal["response", "all"]

Fault = Literal["too_long", "empty", "equal"]
"""Why a row that can be read is of no use: too many tokens, no text where some is needed, a preference for neither."""


def dropped(**rules: Literal["refuse", "drop"]) -> frozenset[Fault]:
    """The faults, by name, whose rule is to drop."""
    return frozenset(cast(Fault, fault) for fault, rule in rules.items() if rule == "drop")


class RandomPrompts(Section):
    """Prompts of random tokens, for trials without a data set."""

    count: Count
    """Prompts in the set."""
    min_tokens: Count
    """Tokens of a prompt, at least."""
    max_tokens: Count
    """Tokens of a prompt, at most."""
    seed: Seed = 0
    """Seed of the tokens."""


class PromptData(Section):
    """The prompts, and how many make a step."""

    prompts: Source | None = None
    """Rows with a prompt each: text, a chat, or token_ids; see docs/data.md."""
    random: RandomPrompts | None = None
    """Make random prompts instead; exactly one of prompts and random is given."""
    chat_template: bool = False
    """Text prompts are what a user says: put them into the tokenizer's chat template. Chats always are."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What becomes of rows that leave no room for the response, and of longer rows of ptx.data: an error, or left out
    and counted."""
    prompts_per_step: Count
    """Prompts that are answered in a step."""
    samples_per_prompt: Count = 1
    """Answers to each prompt."""

    @property
    def drop(self) -> frozenset[Fault]:
        """Faults of the rows that are left out."""
        return dropped(too_long=self.too_long)


class FixedRows(Section):
    """What every stage that trains on fixed rows says of them."""

    evaluation: Source | None = None
    """Held-out rows of the same form."""
    evaluate_every: Count | None = None
    """Steps between evaluations; null: before the first step and after the last."""
    chat_template: bool = False
    """Text prompts are what a user says: put them into the tokenizer's chat template. Chats always are."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What becomes of longer rows: an error, or left out and counted."""
    empty: Literal["refuse", "drop"] = "drop"
    """What becomes of rows with a response without text: an error, or left out and counted."""

    @property
    def drop(self) -> frozenset[Fault]:
        """Faults of the rows that are left out."""
        return dropped(too_long=self.too_long, empty=self.empty)


class TextData(FixedRows):
    """Demonstrations, and how many make a step."""

    train: Source
    """Rows with a prompt and its response, or with a chat whose last message is the response."""
    max_tokens: Count
    """Tokens of a prompt and its response together, at most."""
    sequences_per_step: Count
    """Rows that make an optimizer step."""
    loss_on: LossOn = "response"
    """Tokens that are learnt: those of the response, or the prompt's too."""


class PairData(FixedRows):
    """Preference pairs, and how many make a step."""

    train: Source
    """Rows with a prompt, a chosen and a rejected response; for best_of_n, with a prompt and candidates."""
    max_tokens: Count
    """Tokens of a prompt and one of its responses together, at most."""
    pairs_per_step: Count
    """Pairs, or prompts with candidates, that make an optimizer step."""
    equal: Literal["refuse", "drop"] = "drop"
    """What becomes of rows whose better response is the same as another: an error, or left out and counted."""

    @property
    def drop(self) -> frozenset[Fault]:
        """Faults of the rows that are left out."""
        return dropped(too_long=self.too_long, empty=self.empty, equal=self.equal)
