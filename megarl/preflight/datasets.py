"""The data of each stage, read before anything starts; what is wrong with it becomes problems of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from megarl.config import EvalConfig, PPOConfig, Problem, RAFTConfig, RewardModelConfig, SFTConfig
from megarl.config.schema import Fault, SourceFields
from megarl.data.demonstrations import Demonstration, load_demonstrations
from megarl.data.encoding import Encoder
from megarl.data.preferences import Preference, load_candidates, load_pairs
from megarl.data.prompts import load_prompts, random_prompts
from megarl.data.sources import LeftOut, LeftOutRows, Rows
from megarl.data.tokenizer import Tokenizer
from megarl.types import Prompt

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PromptSets:
    """What PPO reads, and evaluations.

    Args:
        train: prompts to learn from; an evaluation by itself has none.
        held_out: prompts of the evaluations; empty without any.
        tokenizer: None where the rows have token ids.
        left_out: rows that are of no use.
        texts: what the actor learns beside; empty without any.
    """

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    tokenizer: Tokenizer | None
    left_out: LeftOutRows
    texts: Sequence[Demonstration] = ()

    @property
    def rows(self) -> Mapping[str, Sequence[object]]:
        """What was made of each source, by its field."""
        return {"data.prompts": self.train, "evaluation.prompts": self.held_out, "ptx.data": self.texts}


@dataclass(frozen=True, kw_only=True)
class TextSets:
    """What supervised fine-tuning reads; see PromptSets. ``held_out`` is None where nothing is evaluated."""

    train: Sequence[Demonstration]
    held_out: Sequence[Demonstration] | None
    tokenizer: Tokenizer | None
    left_out: LeftOutRows

    @property
    def rows(self) -> Mapping[str, Sequence[object]]:
        """What was made of each source, by its field."""
        return {"data.train": self.train, "data.evaluation": self.held_out or ()}


@dataclass(frozen=True, kw_only=True)
class PairSets:
    """What a reward model's training reads; see TextSets. ``reference`` are the prompts of the reference samples."""

    train: Sequence[Preference]
    held_out: Sequence[Preference] | None
    reference: Sequence[Prompt]
    tokenizer: Tokenizer | None
    left_out: LeftOutRows

    @property
    def rows(self) -> Mapping[str, Sequence[object]]:
        """What was made of each source, by its field."""
        return {
            "data.train": self.train,
            "data.evaluation": self.held_out or (),
            "normalisation.prompts": self.reference,
        }


class DataReader:
    """Reads sources with one tokenizer, and collects what is wrong with them.

    Args:
        tokenizer: of the run.
        vocab_size: ids must lie below it.
        chat_template: text prompts are what a user says in a chat.
        drop: faults of rows that are left out; rows with others are errors.
        rules: the fields that say which these are.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        *,
        chat_template: bool,
        drop: Collection[Fault],
        rules: Sequence[str],
    ) -> None:
        self.tokenizer, self._rules = tokenizer, ", ".join(rules)
        self._drop, self._left_out = frozenset(drop), list[tuple[str, LeftOut]]()
        self.problems: list[Problem] = []
        self._vocab_size, self._chat_template = vocab_size, chat_template

    @property
    def left_out(self) -> LeftOutRows:
        """Rows that were left out so far."""
        return LeftOutRows(faults=self._drop, rows=tuple(self._left_out))

    def prompts(
        self, field: str, source: SourceFields, max_tokens: int, *, at_least: tuple[str, int] | None = None
    ) -> list[Prompt]:
        """Prompts of at most ``max_tokens``, and at least as many of them as a field says, given with its value."""
        return self._read(load_prompts, field, source, max_tokens, at_least=at_least)

    def demonstrations(self, field: str, source: SourceFields, max_tokens: int) -> list[Demonstration]:
        """Demonstrations of at most ``max_tokens``."""
        return self._read(load_demonstrations, field, source, max_tokens)

    def texts(self, field: str, source: SourceFields, max_tokens: int, *, chat_template: bool) -> list[Demonstration]:
        """Demonstrations of a source that says itself whether its prompts are what a user says."""
        return self._read(load_demonstrations, field, source, max_tokens, chat_template=chat_template)

    def pairs(self, field: str, source: SourceFields, max_tokens: int, *, margins: bool) -> list[Preference]:
        """Pairs of at most ``max_tokens`` with either response."""
        return self._read(partial(load_pairs, margins=margins), field, source, max_tokens)

    def candidates(self, field: str, source: SourceFields, max_tokens: int) -> list[Preference]:
        """Prompts with candidates, of at most ``max_tokens`` with any of them."""
        return self._read(load_candidates, field, source, max_tokens)

    def _read(
        self,
        load: Callable[..., Rows[T]],
        field: str,
        source: SourceFields,
        max_tokens: int,
        *,
        at_least: tuple[str, int] | None = None,
        chat_template: bool | None = None,
    ) -> list[T]:
        """Returns the rows, none where something is wrong; ``chat_template`` overrides the reader's."""
        chats = self._chat_template if chat_template is None else chat_template
        try:
            encoder = Encoder(self.tokenizer, vocab_size=self._vocab_size, chat_template=chats, max_tokens=max_tokens)
            rows = load(source, encoder, drop=self._drop)
        except (OSError, ValueError) as error:
            fix = f"correct the path or the rows (docs/data.md); {self._rules} choose what happens to unusable ones"
            self.problems.append(Problem(field=field, value=source.path, rule=str(error), fix=fix))
            return []
        self._left_out += [(field, row) for row in rows.left_out]
        if at_least is not None and len(rows.items) < at_least[1]:
            left = f", and {len(rows.left_out)} that are left out" if rows.left_out else ""
            rule = f"has rows for {at_least[0]} = {at_least[1]}: it has {len(rows.items)} usable ones{left}"
            fix = f"add rows, or lower {at_least[0]}"
            self.problems.append(Problem(field=field, value=source.path, rule=rule, fix=fix))
        return list(rows.items)


def read_prompt_sets(config: PPOConfig | RAFTConfig, reader: DataReader, vocab_size: int) -> PromptSets:
    """The prompts of a run that trains on rollouts."""
    data, made = config.data, config.data.random
    room = config.rollout.max_model_len - config.rollout.max_new_tokens
    train: list[Prompt] = []
    if data.prompts is not None:
        train = reader.prompts(
            "data.prompts", data.prompts, room, at_least=("data.prompts_per_step", data.prompts_per_step)
        )
    elif made is not None and made.min_tokens <= made.max_tokens:
        train = random_prompts(
            count=made.count,
            min_tokens=made.min_tokens,
            max_tokens=made.max_tokens,
            vocab_size=vocab_size,
            seed=made.seed,
        )
    held_out: list[Prompt] = []
    if config.evaluation is not None:
        held_out = reader.prompts("evaluation.prompts", config.evaluation.prompts, room)
    texts: list[Demonstration] = []
    if isinstance(config, PPOConfig) and config.ptx is not None:
        ptx = config.ptx
        texts = reader.texts("ptx.data", ptx.data, ptx.max_tokens, chat_template=ptx.chat_template)
    return PromptSets(train=train, held_out=held_out, tokenizer=reader.tokenizer, left_out=reader.left_out, texts=texts)


def read_held_out(config: EvalConfig, reader: DataReader) -> PromptSets:
    """The prompts of an evaluation by itself."""
    room = config.rollout.max_model_len - config.rollout.max_new_tokens
    held_out = reader.prompts("evaluation.prompts", config.evaluation.prompts, room)
    return PromptSets(train=(), held_out=held_out, tokenizer=reader.tokenizer, left_out=reader.left_out)


def read_text_sets(config: SFTConfig, reader: DataReader) -> TextSets:
    """The demonstrations of a run of supervised fine-tuning."""
    data = config.data
    train = reader.demonstrations("data.train", data.train, data.max_tokens)
    held_out = None
    if data.evaluation is not None:
        held_out = reader.demonstrations("data.evaluation", data.evaluation, data.max_tokens)
    return TextSets(train=train, held_out=held_out, tokenizer=reader.tokenizer, left_out=reader.left_out)


def read_pair_sets(config: RewardModelConfig, reader: DataReader) -> PairSets:
    """The pairs of a reward model's training."""
    data, rollout, normalisation = config.data, config.rollout, config.normalisation
    loss = config.reward.loss
    read = reader.candidates
    if loss.name != "best_of_n":
        read = partial(reader.pairs, margins=loss.name == "pairwise" and loss.options["margin"])
    train = read("data.train", data.train, data.max_tokens)
    held_out = None
    if data.evaluation is not None:
        held_out = read("data.evaluation", data.evaluation, data.max_tokens)
        reader.problems += _of_one_size(train, held_out, data.evaluation.path)
    reference: list[Prompt] = []
    if normalisation is not None and rollout is not None:
        room = rollout.max_model_len - rollout.max_new_tokens
        needed = ("normalisation.samples", normalisation.samples)
        reference = reader.prompts("normalisation.prompts", normalisation.prompts, room, at_least=needed)
    return PairSets(
        train=train, held_out=held_out, reference=reference, tokenizer=reader.tokenizer, left_out=reader.left_out
    )


def _of_one_size(train: Sequence[Preference], held_out: Sequence[Preference], path: str) -> Iterator[Problem]:
    """Candidates are as many in both sources, if both have rows."""
    if train and held_out and len(train[0].responses) != len(held_out[0].responses):
        rule = f"has {len(train[0].responses)} candidates a row, as data.train; it has {len(held_out[0].responses)}"
        fix = "take rows with as many candidates"
        yield Problem(field="data.evaluation", value=path, rule=rule, fix=fix)
