"""The data of each stage, read before the run; its faults become problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
from megarl.data.training_texts import load_candidates, load_demonstrations, load_pairs, load_rated
from megarl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Sets:
    """The data of a stage.

    Args:
        rows: items of each source that the run has, by its field.
    """

    rows: Mapping[str, Sequence[Any]]
    tokenizer: Tokenizer | None
    left_out: LeftOutRows


@dataclass(kw_only=True)
class DataReader:
    """Reads sources with one tokenizer, and collects the problems.

    Args:
        chat_template: whether a text prompt becomes a chat of one user message.
        drop: faults of rows that are left out; rows with other faults are errors.
        rules: fields that choose these faults.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    chat_template: bool
    template_arguments: Mapping[str, Any]
    drop: frozenset[Fault]
    rules: str
    problems: list[Problem] = field(default_factory=list[Problem])
    rows: dict[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    left_out: list[tuple[str, LeftOut]] = field(default_factory=list[tuple[str, LeftOut]])

    def sets(self) -> Sets:
        """Returns what was read."""
        left_out = LeftOutRows(faults=self.drop, rows=tuple(self.left_out))
        return Sets(rows=self.rows, tokenizer=self.tokenizer, left_out=left_out)

    def read(
        self,
        load: Callable[..., Rows[Any]],
        name: str,
        source: SourceFields,
        max_tokens: int,
        *,
        at_least: tuple[str, int] | None = None,
        chat_template: bool | None = None,
    ) -> None:
        """Reads the items of a source; none if it has a problem.

        Args:
            at_least: field whose value is the least number of items, and that value.
            chat_template: setting in place of the reader's.
        """
        chats = self.chat_template if chat_template is None else chat_template
        self.rows[name] = ()
        try:
            encoder = Encoder(
                self.tokenizer,
                vocab_size=self.vocab_size,
                chat_template=chats,
                max_tokens=max_tokens,
                template_arguments=self.template_arguments,
            )
            rows = load(source, encoder, drop=self.drop)
        except (OSError, ValueError) as error:
            fix = "correct the path or the rows (docs/data.md), or leave out those that can be: "
            fix += self.rules
            self.problems.append(Problem(name, source.path, str(error), fix))
            return
        self.left_out += [(name, row) for row in rows.left_out]
        if at_least is not None and len(rows.items) < at_least[1]:
            rule = f"must have rows for {at_least[0]} = {at_least[1]}: it has {len(rows.items)} usable ones"
            if rows.left_out:
                rule += f", and {len(rows.left_out)} that are left out"
            fix = f"add rows, or lower {at_least[0]}"
            self.problems.append(Problem(name, source.path, rule, fix))
        self.rows[name] = rows.items

    def read_both(self, load: Callable[..., Rows[Any]], data: TextData | PairData) -> None:
        """Reads a section's training data, and its evaluation if it has one."""
        self.read(load, "data.train", data.train, data.max_tokens)
        if data.evaluation is not None:
            self.read(load, "data.evaluation", data.evaluation, data.max_tokens)


def text_sets(data: TextData, reader: DataReader) -> Sets:
    """Reads the demonstrations of supervised fine-tuning."""
    reader.read_both(load_demonstrations, data)
    return reader.sets()


def prompt_sets(config: SamplingConfig, reader: DataReader) -> Sets:
    """Reads the prompts of training and evaluation, and the mixed-in texts."""
    room = config.rollout.max_model_len - config.rollout.max_new_tokens
    data = config.sampled_prompts
    load = partial(load_prompts, optional=config.environment is not None)
    if data is not None and data.prompts is not None:
        needed = ("data.prompts_per_step", data.prompts_per_step)
        reader.read(load, "data.prompts", data.prompts, room, at_least=needed)
        reader.problems += _missing_teachers(config, reader.rows["data.prompts"])
    elif data is not None and data.random is not None and data.random.min_tokens <= data.random.max_tokens:
        reader.rows["data.prompts"] = random_prompts(**data.random.model_dump(), vocab_size=reader.vocab_size)
    elif data is not None and data.tasks is not None:
        reader.rows["data.prompts"] = task_prompts(data.tasks)
    evaluation = config.evaluation
    if evaluation is not None and evaluation.prompts is not None:
        reader.read(load, "evaluation.prompts", evaluation.prompts, room)
    elif evaluation is not None and evaluation.tasks is not None:
        first = data and data.tasks
        if isinstance(evaluation, HeldOut):
            first = evaluation.first_task
        reader.rows["evaluation.prompts"] = task_prompts(evaluation.tasks, first=first or 0)
    ptx = config.mixed_texts
    if ptx is not None:
        reader.read(load_demonstrations, "ptx.data", ptx.data, ptx.max_tokens, chat_template=ptx.chat_template)
    return reader.sets()


def _missing_teachers(config: SamplingConfig, prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """Every prompt has one of several teachers."""
    column = config.teacher_column
    if not config.teachers or column is None:  # for which there is a rule
        return
    for prompt in prompts:
        found = prompt.fields.get(column)
        if not isinstance(found, str) or found not in config.teachers:
            names = ", ".join(config.teachers)
            rule = f"a column of every row with one of {names}; prompt {prompt.prompt_id} has {found!r}"
            yield Problem("reference.column", column, rule, "correct the rows, or name the teacher")
            return


def scored_prompts(
    config: SamplingConfig, rows: Mapping[str, Sequence[Prompt]]
) -> Iterator[tuple[str, Sequence[RewardFunction], Sequence[Prompt]]]:
    """Yields the fields with reward functions, the functions, and the prompts that they score."""
    yield "reward.functions", config.reward.functions, rows.get("data.prompts", ())
    if config.evaluation is not None:
        yield "evaluation.functions", config.evaluation.functions, rows.get("evaluation.prompts", ())


def rated_sets(data: PairData, reader: DataReader) -> Sets:
    """Reads single responses, each desirable or not."""
    reader.read_both(load_rated, data)
    return reader.sets()


def pair_sets(
    data: PairData,
    loss: Choice,
    reader: DataReader,
    normalisation: Normalisation | None = None,
    rollout: Rollout | None = None,
) -> Sets:
    """Reads preferences, and the prompts of a reward model's normalisation."""
    margins = loss.name == "pairwise" and loss.options["margin"]
    load = load_candidates if loss.name == "best_of_n" else partial(load_pairs, margins=margins)
    reader.read_both(load, data)
    train = reader.rows["data.train"]
    held_out = reader.rows.get("data.evaluation")
    if train and held_out and data.evaluation:
        needed = len(train[0].responses)
        found = len(held_out[0].responses)
        if needed != found:
            rule = f"must have {needed} candidates a row, as data.train; it has {found}"
            fix = "use rows with as many candidates"
            reader.problems.append(Problem("data.evaluation", data.evaluation.path, rule, fix))
    if normalisation is not None and rollout is not None:
        room = rollout.max_model_len - rollout.max_new_tokens
        least = ("normalisation.samples", normalisation.samples)
        reader.read(load_prompts, "normalisation.prompts", normalisation.prompts, room, at_least=least)
    return reader.sets()
