"""The data of each stage, read before the run; its faults become problems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from megarl.config import Problem, SamplingConfig
from megarl.config.schema import (
    Choice,
    Fault,
    HeldOut,
    Normalisation,
    PairData,
    RewardFunction,
    Rollout,
    SourceFields,
    TextData,
)
from megarl.data.encoding import Encoder
from megarl.data.prompts import load_prompts, random_prompts, task_prompts
from megarl.data.sources import LeftOut, LeftOutRows, Rows
from megarl.data.tokenizer import Tokenizer
from megarl.data.training_texts import TrainingText, load_candidates, load_demonstrations, load_pairs
from megarl.types import Prompt

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PromptSets:
    """The data of PPO and evaluations.

    Args:
        train: prompts of the training; none in a standalone evaluation.
        held_out: prompts of the evaluations.
        texts: demonstrations that are mixed into the actor's updates.
    """

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    tokenizer: Tokenizer | None
    left_out: LeftOutRows
    texts: Sequence[TrainingText]

    @property
    def rows(self) -> Mapping[str, Sequence[object]]:
        """The items of each source, by its field."""
        return {"data.prompts": self.train, "evaluation.prompts": self.held_out, "ptx.data": self.texts}


@dataclass(frozen=True, kw_only=True)
class TextSets:
    """The data of supervised fine-tuning; `held_out` is None without evaluations."""

    train: Sequence[TrainingText]
    held_out: Sequence[TrainingText] | None
    tokenizer: Tokenizer | None
    left_out: LeftOutRows

    @property
    def rows(self) -> Mapping[str, Sequence[object]]:
        return {"data.train": self.train, "data.evaluation": self.held_out or ()}


@dataclass(frozen=True, kw_only=True)
class PairSets:
    """The data of a reward model; `held_out` is None without evaluations, `reference` sets its scale."""

    train: Sequence[TrainingText]
    held_out: Sequence[TrainingText] | None
    reference: Sequence[Prompt]
    tokenizer: Tokenizer | None
    left_out: LeftOutRows

    @property
    def rows(self) -> Mapping[str, Sequence[object]]:
        held_out = self.held_out or ()
        return {"data.train": self.train, "data.evaluation": held_out, "normalisation.prompts": self.reference}


Sets = PromptSets | TextSets | PairSets


class DataReader:
    """Reads sources with one tokenizer, and collects the problems.

    Args:
        chat_template: whether a text prompt becomes a chat of one user message.
        template_arguments: arguments of the chat template.
        drop: faults of rows that are left out; rows with other faults are errors.
        rules: fields that choose these faults.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        *,
        chat_template: bool,
        template_arguments: Mapping[str, Any],
        drop: Collection[Fault],
        rules: Sequence[str],
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.problems: list[Problem] = []
        self._chat_template = chat_template
        self._rules = ", ".join(rules)
        self._template_arguments = template_arguments
        self._drop = frozenset(drop)
        self._left_out = list[tuple[str, LeftOut]]()

    @property
    def left_out(self) -> LeftOutRows:
        return LeftOutRows(faults=self._drop, rows=tuple(self._left_out))

    def read(
        self,
        load: Callable[..., Rows[T]],
        field: str,
        source: SourceFields,
        max_tokens: int,
        *,
        at_least: tuple[str, int] | None = None,
        chat_template: bool | None = None,
    ) -> list[T]:
        """Returns the items of a source; none if it has a problem.

        Args:
            load: loader of `megarl.data`.
            max_tokens: largest number of tokens of an item.
            at_least: field whose value is the least number of items, and that value.
            chat_template: setting in place of the reader's.
        """
        chats = self._chat_template if chat_template is None else chat_template
        try:
            encoder = Encoder(
                self.tokenizer,
                vocab_size=self.vocab_size,
                chat_template=chats,
                max_tokens=max_tokens,
                template_arguments=self._template_arguments,
            )
            rows = load(source, encoder, drop=self._drop)
        except (OSError, ValueError) as error:
            fix = f"correct the path or the rows (docs/data.md), or leave out those that can be: {self._rules}"
            self.problems.append(Problem(field, source.path, str(error), fix))
            return []
        self._left_out += [(field, row) for row in rows.left_out]
        if at_least is not None and len(rows.items) < at_least[1]:
            rule = f"has rows for {at_least[0]} = {at_least[1]}: it has {len(rows.items)} usable ones"
            if rows.left_out:
                rule += f", and {len(rows.left_out)} that are left out"
            fix = f"add rows, or lower {at_least[0]}"
            self.problems.append(Problem(field, source.path, rule, fix))
        return list(rows.items)

    def read_both(self, load: Callable[..., Rows[T]], data: TextData | PairData) -> tuple[list[T], list[T] | None]:
        """Returns the items of a section's training data, and of its evaluation if it has one."""
        train = self.read(load, "data.train", data.train, data.max_tokens)
        if data.evaluation is None:
            return train, None
        return train, self.read(load, "data.evaluation", data.evaluation, data.max_tokens)


def text_sets(data: TextData, reader: DataReader) -> TextSets:
    """Reads the demonstrations of supervised fine-tuning."""
    train, held_out = reader.read_both(load_demonstrations, data)
    return TextSets(train=train, held_out=held_out, tokenizer=reader.tokenizer, left_out=reader.left_out)


def prompt_sets(config: SamplingConfig, reader: DataReader) -> PromptSets:
    """Reads the prompts of training and evaluation, and the mixed-in texts."""
    room = config.rollout.max_model_len - config.rollout.max_new_tokens
    data = config.sampled_prompts
    load = partial(load_prompts, optional=config.environment is not None)
    train: list[Prompt] = []
    if data is not None and data.prompts is not None:
        needed = ("data.prompts_per_step", data.prompts_per_step)
        train = reader.read(load, "data.prompts", data.prompts, room, at_least=needed)
    elif data is not None and data.random is not None and data.random.min_tokens <= data.random.max_tokens:
        train = random_prompts(**data.random.model_dump(), vocab_size=reader.vocab_size)
    elif data is not None and data.tasks is not None:
        train = task_prompts(data.tasks)
    held_out: list[Prompt] = []
    evaluation = config.evaluation
    if evaluation is not None and evaluation.prompts is not None:
        held_out = reader.read(load, "evaluation.prompts", evaluation.prompts, room)
    elif evaluation is not None and evaluation.tasks is not None:
        first = data and data.tasks
        if isinstance(evaluation, HeldOut):
            first = evaluation.first_task
        held_out = task_prompts(evaluation.tasks, first=first or 0)
    texts: list[TrainingText] = []
    ptx = config.mixed_texts
    if ptx is not None:
        texts = reader.read(load_demonstrations, "ptx.data", ptx.data, ptx.max_tokens, chat_template=ptx.chat_template)
    return PromptSets(train=train, held_out=held_out, tokenizer=reader.tokenizer, left_out=reader.left_out, texts=texts)


def scored_prompts(
    config: SamplingConfig, sets: PromptSets | None
) -> Iterator[tuple[str, Sequence[RewardFunction], Sequence[Prompt]]]:
    """Yields the fields with reward functions, the functions, and the prompts that they score."""
    yield "reward.functions", config.reward.functions, sets.train if sets else ()
    if config.evaluation is not None:
        yield "evaluation.functions", config.evaluation.functions, sets.held_out if sets else ()


def pair_sets(
    data: PairData,
    loss: Choice,
    normalisation: Normalisation | None,
    rollout: Rollout | None,
    reader: DataReader,
) -> PairSets:
    """Reads the preferences of a reward model, and the prompts of its normalisation."""
    margins = loss.name == "pairwise" and loss.options["margin"]
    load = load_candidates if loss.name == "best_of_n" else partial(load_pairs, margins=margins)
    train, held_out = reader.read_both(load, data)
    if train and held_out and data.evaluation:
        needed = len(train[0].responses)
        found = len(held_out[0].responses)
        if needed != found:
            rule = f"has {needed} candidates a row, as data.train; it has {found}"
            fix = "use rows with as many candidates"
            reader.problems.append(Problem("data.evaluation", data.evaluation.path, rule, fix))
    reference: list[Prompt] = []
    if normalisation is not None and rollout is not None:
        room = rollout.max_model_len - rollout.max_new_tokens
        least = ("normalisation.samples", normalisation.samples)
        reference = reader.read(load_prompts, "normalisation.prompts", normalisation.prompts, room, at_least=least)
    return PairSets(
        train=train,
        held_out=held_out,
        reference=reference,
        tokenizer=reader.tokenizer,
        left_out=reader.left_out,
    )
