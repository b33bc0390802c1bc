"""Rules of the data and of the run's directory, and the arithmetic of batches and lengths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.config.problems import Problem, correct_path, ineffective_settings
from megarl.config.rules.placement_rules import roles_of
from megarl.config.schema import (
    PTX,
    Evaluation,
    Group,
    HeldOut,
    Model,
    Normalisation,
    PairData,
    PromptData,
    RAFTSettings,
    Rollout,
    Run,
    Scores,
    SourceFields,
    TextData,
)

Groups = Mapping[str, Group]
AnyData = TextData | PairData | PromptData

_FILES = (".jsonl", ".parquet")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_OTHER_FILES = (".arrow", ".csv", ".gz", ".json", ".tsv", ".txt", ".zip", ".zst")


def files_exist(
    data: AnyData | None, evaluation: Evaluation | None, normalisation: Normalisation | None, ptx: PTX | None
) -> Iterator[Problem]:
    """Every file of data is there; a file is all there is of it."""
    for field, source in named_sources(data, evaluation, normalisation, ptx):
        if not source.path.endswith(_FILES):
            if Path(source.path).suffix in _OTHER_FILES:
                rule = f"a file that ends in {' or '.join(_FILES)}, or the name of a Hugging Face data set"
                yield Problem(field, source.path, rule, "convert the file")
            elif not Path(source.path).is_dir() and not _HUB_NAME.fullmatch(source.path):
                rule = f"a file that exists and ends in {' or '.join(_FILES)}, or the name of a Hugging Face data set"
                fix = f"{correct_path(source.path)}, or write the name with its owner, such as openai/gsm8k"
                yield Problem(field, source.path, rule, fix)
            continue
        if not Path(source.path).is_file():
            fix = correct_path(source.path)
            yield Problem(field, source.path, "a file that exists", fix)
        for name in ("subset", "split"):
            value = getattr(source, name)
            if value is not None:
                rule = "has an effect for a Hugging Face data set alone; this is a file"
                yield Problem(f"{field}.{name}", value, rule, "remove it")


def run_directories_can_be_made(run: Run) -> Iterator[Problem]:
    """No file is where the run is to be, and no directory is made on the way to leave it again."""
    path = Path(run.dir)
    for place in (*reversed(path.parents), path):
        if place.exists() and not place.is_dir():
            rule = f"a directory, or one that can be made; {place} is a file"
            yield Problem("run.dir", run.dir, rule, "choose another directory")
        if place.name == ".." and not place.parent.exists():
            rule = f"a directory that can be made; {place.parent}, before .., is not there"
            yield Problem("run.dir", run.dir, rule, f"write {os.path.normpath(run.dir)}")
            return


def run_directories_are_in_full(run: Run) -> Iterator[Problem]:
    """No directory called ~ is made in place of a home directory."""
    if run.dir.startswith("~"):
        rule = "a path in full: ~ is not read as a home directory"
        yield Problem("run.dir", run.dir, rule, "write the path in full; a shell fills in $HOME")


def named_sources(
    data: AnyData | None, evaluation: Evaluation | None, normalisation: Normalisation | None, ptx: PTX | None
) -> Iterator[tuple[str, SourceFields]]:
    """Every source of a run with its field."""
    found: dict[str, SourceFields | None] = {}
    if isinstance(data, PromptData):
        found["data.prompts"] = data.prompts
    elif data is not None:
        found |= {"data.train": data.train, "data.evaluation": data.evaluation}
    found["evaluation.prompts"] = None if evaluation is None else evaluation.prompts
    found["normalisation.prompts"] = None if normalisation is None else normalisation.prompts
    found["ptx.data"] = None if ptx is None else ptx.data
    yield from ((field, source) for field, source in found.items() if source is not None)


def chat_templates_have_a_tokenizer(
    model: Model, data: AnyData | None, evaluation: Evaluation | None, ptx: PTX | None
) -> Iterator[Problem]:
    """A random model has no tokenizer of its own."""
    held_out = evaluation if isinstance(evaluation, HeldOut) else None
    for field, rows in (("data", data), ("evaluation", held_out), ("ptx", ptx)):
        if rows is not None and rows.chat_template and model.tokenizer is None and model.path is None:
            fix = "set model.tokenizer, or set it to false"
            yield Problem(f"{field}.chat_template", "True", "needs a tokenizer", fix)


def one_prompt_source(data: PromptData) -> Iterator[Problem]:
    """Either a file or random prompts; random lengths are in order, and a step has enough prompts."""
    if (data.prompts is None) == (data.random is None):
        given = "neither" if data.prompts is None else "both"
        fix = "give data.prompts, or data.random, and set the other to null"
        yield Problem("data", given, "exactly one of prompts and random is given", fix)
    if data.random is None:
        return
    if data.random.min_tokens > data.random.max_tokens:
        rule = f"at most data.random.max_tokens = {data.random.max_tokens}"
        value, fix = str(data.random.min_tokens), "lower it, or raise data.random.max_tokens"
        yield Problem("data.random.min_tokens", value, rule, fix)
    if data.random.count < data.prompts_per_step:
        rule = f"at least data.prompts_per_step = {data.prompts_per_step}"
        value, fix = str(data.random.count), "raise it, or lower data.prompts_per_step"
        yield Problem("data.random.count", value, rule, fix)


def random_prompts_are_ids(data: PromptData, evaluation: Evaluation | None, ptx: PTX | None) -> Iterator[Problem]:
    """Random prompts are neither text nor too long; how other rows are read may still be said."""
    if data.random is None:
        return
    names: list[str] = []
    if evaluation is None:
        names = ["chat_template"] if ptx is not None else ["chat_template", "too_long"]
    yield from ineffective_settings(
        "data", data, names, "with data.random, and no rows that are read", "or give data.prompts"
    )


def discarded_ends_have_no_score(raft: RAFTSettings, scores: Scores) -> Iterator[Problem]:
    """What is never selected needs no score."""
    if raft.discard_unfinished and scores.truncate_at is None:
        where = "with raft.discard_unfinished"
        yield from ineffective_settings(
            "scores", scores, ("missing_end",), where, "or set raft.discard_unfinished to false"
        )


def lengths_fit(data: PromptData | PairData | None, rollout: Rollout | None) -> Iterator[Problem]:
    """An engine can hold the longest prompt with the longest response."""
    if rollout is None:
        return
    made = data.random if isinstance(data, PromptData) else None
    prompt, longest = (1, "") if made is None else (made.max_tokens, f" ({made.max_tokens} tokens)")
    needed = prompt + rollout.max_new_tokens
    if rollout.max_model_len < needed:
        sum_of = f"{rollout.max_new_tokens} and the tokens of the longest prompt" if made is None else f"{needed}"
        yield Problem(
            "rollout.max_model_len",
            str(rollout.max_model_len),
            f"covers the longest prompt{longest} and rollout.max_new_tokens = {rollout.max_new_tokens}",
            f"set it to {sum_of} or more, or lower rollout.max_new_tokens",
        )


def micro_batches_hold_a_sample(
    groups: Groups, data: AnyData | None, rollout: Rollout | None, ptx: PTX | None
) -> Iterator[Problem]:
    """The longest sequence fits into one micro-batch; of a preference pair, both its sequences."""
    needed: dict[str, int] = {}
    if rollout is not None:
        needed["rollout.max_model_len"] = rollout.max_model_len
    if isinstance(data, TextData):
        needed["data.max_tokens"] = data.max_tokens
    if isinstance(data, PairData):
        needed["twice data.max_tokens, for a pair,"] = 2 * data.max_tokens
    for field, _, name, role in roles_of(groups):
        texts = {"ptx.max_tokens": ptx.max_tokens} if ptx is not None and name == "actor" else {}
        for what, tokens in {**needed, **texts}.items():
            if role.tokens_per_micro_batch < tokens:
                yield Problem(
                    f"{field}.tokens_per_micro_batch",
                    str(role.tokens_per_micro_batch),
                    f"at least {what} = {tokens}",
                    f"set it to {tokens} or more, or shorten the sequences",
                )


def evaluations_have_rows(data: TextData | PairData) -> Iterator[Problem]:
    """Nothing is evaluated without held-out rows."""
    if data.evaluate_every is not None and data.evaluation is None:
        yield Problem(
            "data.evaluate_every",
            str(data.evaluate_every),
            "has an effect with data.evaluation alone",
            "give data.evaluation, or remove it",
        )


def reference_samples_have_engines(normalisation: Normalisation | None, rollout: Rollout | None) -> Iterator[Problem]:
    """Reference samples are generated, and nothing else is."""
    if normalisation is not None and rollout is None:
        fix = "add the section rollout, or set normalisation to null"
        yield Problem("normalisation", "given", "needs the section rollout", fix)
    if normalisation is None and rollout is not None:
        fix = "add the section normalisation, or set rollout to null"
        yield Problem("rollout", "given", "has an effect with normalisation alone", fix)


RULES = (
    files_exist,
    run_directories_can_be_made,
    run_directories_are_in_full,
    chat_templates_have_a_tokenizer,
    micro_batches_hold_a_sample,
)
"""Of every stage."""
