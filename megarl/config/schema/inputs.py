"""The model and the data of a run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BeforeValidator

from megarl.algos import registry
from megarl.bounds import Count, Seed
from megarl.config.schema.base import Interval, Section
from megarl.config.schema.choices import Choice, CustomFunction, OneOf, with_shorthand
from megarl.files import read_json


class RandomModel(Section):
    """A randomly initialized model, for trials without a checkpoint."""

    config: Mapping[str, Any]
    """Fields of the model's Hugging Face config.json; model_type chooses the architecture."""
    seed: Seed = 0
    """Seed of the weights."""


LayerChoice = Literal["auto", "local", "transformer_engine"]
KernelChoice = Literal["auto", "reference"]


class Model(Section):
    """The model; in PPO the reference starts as its copy, and the critic from its body."""

    path: str | None = None
    """Directory of a Hugging Face checkpoint (config.json and safetensors)."""
    random: RandomModel | None = None
    """A random model; exactly one of path and random is given."""
    vocab_size: Count | None = None
    """Number of token ids in use; higher ones have no probability. null uses all."""
    tokenizer: str | None = None
    """Directory of a Hugging Face tokenizer; null: the model's directory, if it has one."""
    layers: LayerChoice = "auto"
    """Layers of the trainers: Megatron's own (local) or Transformer Engine's. auto: the latter on a
    GPU if installed and able to compute the model; see docs/gpu.md."""
    kernels: KernelChoice = "auto"
    """Kernels of norms, activation, rope and log-probabilities: auto takes fused ones on a GPU;
    reference computes op by op, as on a CPU, for when a fused kernel is in doubt."""

    def hf_config(self) -> Mapping[str, Any]:
        """Returns the model's config.json."""
        if self.random is not None:
            return self.random.config
        return read_hf_config(self.path or "")

    def tokenizer_directory(self, model_dir: str) -> str:
        """Returns the directory of the tokenizer; `model_dir` has the model's files."""
        return self.tokenizer or model_dir


def read_hf_config(path: str) -> Mapping[str, Any]:
    """Reads the config.json of a Hugging Face checkpoint directory.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a JSON object.
    """
    fields = read_json(Path(path) / "config.json")
    if not isinstance(fields, dict):
        raise ValueError(f"{path}/config.json is not a JSON object")
    return cast(dict[str, Any], fields)


class SourceFields(Section):
    """Rows of a file, or of a data set of the Hugging Face hub."""

    path: str
    """A .jsonl or .parquet file, or the name of a Hugging Face data set, such as openai/gsm8k."""
    subset: str | None = None
    """Configuration of a Hugging Face data set."""
    split: str | None = None
    """Split of a Hugging Face data set, train for example."""
    columns: Mapping[str, str] = {}
    """Names of columns: {prompt: question} reads the column question as prompt."""


Source = Annotated[SourceFields, BeforeValidator(partial(with_shorthand, key="path"))]
LossOn = Literal["response", "all"]

Fault = Literal["too_long", "empty", "equal"]
"""Why a readable row is not used: it has too many tokens, an empty response, or equal responses."""


class RowSettings(Section):
    """How rows are read."""

    chat_template: bool = False
    """Put text prompts into the chat template, as a user message; chats always are."""
    chat_template_kwargs: Mapping[str, Any] = {}
    """Arguments of the chat template, such as enable_thinking; for held-out prompts, too."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Rows that are too long, or leave no room for the response: an error, or left out and counted."""

    @property
    def drop(self) -> frozenset[Fault]:
        """The faults whose rows are left out."""
        return frozenset(fault for fault in get_args(Fault) if getattr(self, fault, None) == "drop")


class RandomPrompts(Section):
    """Prompts of random tokens, for trials without a data set."""

    count: Count
    """Number of prompts."""
    min_tokens: Count
    """Least number of tokens of a prompt."""
    max_tokens: Count
    """Largest number of tokens of a prompt."""
    seed: Seed = 0
    """Seed of the tokens."""


class UniformCurriculum(Choice):
    """Every epoch has all prompts, in a random order."""

    name: Literal["uniform"] = "uniform"


CURRICULA = OneOf(UniformCurriculum, registry.CURRICULA, CustomFunction, default="uniform")


class PromptData(RowSettings):
    """The prompts, and how many a step has."""

    prompts: Source | None = None
    """Rows with a prompt each: text, a chat, or token ids; see docs/data.md."""
    random: RandomPrompts | None = None
    """Random prompts."""
    tasks: Count | None = None
    """Number of tasks that the environment makes: rows with an index alone, from 0. Exactly one of
    prompts, random and tasks is given."""
    prompts_per_step: Count
    """Prompts of a step."""
    samples_per_prompt: Count = 1
    """Responses to each prompt."""
    curriculum: Annotated[Choice, CURRICULA] = CURRICULA("uniform")
    """How the prompts of a step are chosen: in epochs, or by the scores of earlier steps."""
    score_range: Interval = (0.0, 1.0)
    """Total scores of a wrong and of a right response, between which a curriculum counts it as
    solved in part, [lower, upper], or a number for both sides of 0."""

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt


class FixedRows(RowSettings):
    """The fields of data that is trained on as it is."""

    evaluation: Source | None = None
    """Held-out rows of the same form."""
    evaluate_every: Count | None = None
    """Steps between evaluations; null: before the first step and after the last."""
    empty: Literal["refuse", "drop"] = "drop"
    """Rows with an empty response: an error, or left out and counted."""


class TextData(FixedRows):
    """The demonstrations, and how many a step has."""

    train: Source
    """Rows with a prompt and its response, or with a chat whose last message is the response."""
    max_tokens: Count
    """Largest number of tokens of a prompt and its response together."""
    sequences_per_step: Count
    """Rows of an optimizer step."""
    loss_on: LossOn = "response"
    """Tokens in the loss: of the response, or of the prompt too."""


class PairData(FixedRows):
    """The preference pairs, and how many a step has."""

    train: Source
    """Rows with a prompt, and a chosen and a rejected response, candidates for best_of_n, or a
    response and its label for kto."""
    max_tokens: Count
    """Largest number of tokens of a prompt and one of its responses together."""
    pairs_per_step: Count
    """Pairs, prompts with candidates, or labelled responses, of an optimizer step."""
    equal: Literal["refuse", "drop"] = "drop"
    """Rows whose better response equals another: an error, or left out and counted."""
