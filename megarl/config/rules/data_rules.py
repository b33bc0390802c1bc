"""Rules of the data, and of the sizes of batches and sequences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from megarl.config.problems import Broken, correct_path, ineffective_settings
from megarl.config.rules.placement_rules import roles_of
from megarl.config.schema import (
    PTX,
    Evaluation,
    Groups,
    PairData,
    PromptData,
    Reward,
    Rollout,
    RowSettings,
    SourceFields,
    TextData,
    TrainingRun,
)

_FILES = (".jsonl", ".parquet")
_OTHER_FILES = (".arrow", ".csv", ".gz", ".json", ".tsv", ".txt", ".zip", ".zst")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FORMS = f"ends in {' or '.join(_FILES)}, or the name of a Hugging Face data set"


def sources_exist(field: str, source: SourceFields) -> Iterator[Broken]:
    """A source is a file that exists, or a data set, which alone has subset and split."""
    path = Path(source.path)
    if not source.path.endswith(_FILES):
        if path.suffix in _OTHER_FILES:
            yield field, f"a file that {_FORMS}", "convert the file"
        elif not path.is_dir() and not _HUB_NAME.fullmatch(source.path):
            fix = f"{correct_path(source.path)}, or write the name with its owner, such as openai/gsm8k"
            yield field, f"a file that exists and {_FORMS}", fix
        return
    if not path.is_file():
        yield field, "a file that exists", correct_path(source.path)
    for name in ("subset", "split"):
        value = getattr(source, name)
        if value is not None:
            rule = "has an effect for a Hugging Face data set alone; this is a file"
            yield f"{field}.{name}", rule, "remove it"


def random_prompts_are_ids(data: PromptData, evaluation: Evaluation | None, ptx: PTX | None) -> Iterator[Broken]:
    """Random prompts and tasks are neither text nor too long; the settings may still be for other rows."""
    if data.prompts is None and (evaluation is None or evaluation.prompts is None):
        names = ["chat_template"]
        if ptx is None:
            names.append("too_long")
        source = "tasks" if data.random is None else "random"
        where = f"with data.{source}, and no rows that are read"
        yield from ineffective_settings("data", data, names, where, "or give data.prompts")


def curricula_read_scores(data: PromptData, reward: Reward, rollout: Rollout, run: TrainingRun) -> Iterator[Broken]:
    """A curriculum other than uniform needs scores of whole responses, and steps that read them."""
    curriculum = data.curriculum
    if curriculum.name == "uniform":
        return
    if reward.dense is not None:
        rule = "uniform with reward.dense, which scores every token: a curriculum reads the scores of responses"
        yield "data.curriculum", rule, "set one of them to its default"
    unread = rollout.max_staleness + 1
    if run.steps is not None and run.steps <= unread:
        rule = f"has no effect in a run of {run.steps} steps, as step {unread + 1} is the first to read scores"
        yield "data.curriculum", rule, f"raise {run.length_field}, or set it to uniform"
    options = curriculum.options
    if curriculum.name == "pools" and options["hard_share"] + options["easy_share"] > 1:
        rule = "hard_share + easy_share must be at most 1"
        yield "data.curriculum.easy_share", rule, "lower one of them"


def lengths_fit(data: PromptData | PairData | None, rollout: Rollout) -> Iterator[Broken]:
    """max_model_len covers the longest prompt with the longest response."""
    response = rollout.max_new_tokens
    prompt = 1
    longest = "the longest prompt"
    least = f"{response} and the tokens of the longest prompt"
    if isinstance(data, PromptData) and data.random is not None:
        prompt = data.random.max_tokens
        longest = f"the longest prompt ({prompt} tokens)"
        least = str(prompt + response)
    if rollout.max_model_len < prompt + response:
        rule = f"must cover {longest} and rollout.max_new_tokens = {response}"
        fix = f"set it to {least} or more, or lower rollout.max_new_tokens"
        yield "rollout.max_model_len", rule, fix


def micro_batches_hold_a_sample(
    groups: Groups, data: RowSettings | None, rollout: Rollout | None, ptx: PTX | None
) -> Iterator[Broken]:
    """A micro-batch holds the longest sequence; of preferences, the two of a pair."""
    needed: dict[str, int] = {}
    if rollout is not None:
        needed["rollout.max_model_len"] = rollout.max_model_len
    if isinstance(data, TextData):
        needed["data.max_tokens"] = data.max_tokens
    if isinstance(data, PairData):
        needed["twice data.max_tokens, for a pair,"] = 2 * data.max_tokens
    for field, _, name, role in roles_of(groups):
        longest = dict(needed)
        if ptx is not None and name == "actor":
            longest["ptx.max_tokens"] = ptx.max_tokens
        for what, tokens in longest.items():
            if role.tokens_per_micro_batch < tokens:
                fix = f"set it to {tokens} or more, or shorten the sequences"
                yield f"{field}.tokens_per_micro_batch", f"at least {what} = {tokens}", fix
