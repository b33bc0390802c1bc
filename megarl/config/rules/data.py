"""Where the data and the run are, and the arithmetic of batches and lengths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.config.problems import Problem, correct_path
from megarl.config.rules.placement import roles_of
from megarl.config.rules.unused import unused
from megarl.config.schema import (
    PTX,
    RAFT,
    Algo,
    Evaluation,
    Group,
    HeldOut,
    Model,
    Normalisation,
    PairData,
    PromptData,
    Rollout,
    Run,
    Scores,
    SourceFields,
    TextData,
)
from megarl.config.schema.raft import BestOfStep

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
                yield Problem(field=field, value=source.path, rule=rule, fix="convert the file")
            elif not Path(source.path).is_dir() and not _HUB_NAME.fullmatch(source.path):
                rule = f"a file that exists and ends in {' or '.join(_FILES)}, or the name of a Hugging Face data set"
                fix = f"{correct_path(source.path)}, or write the name with its owner, such as openai/gsm8k"
                yield Problem(field=field, value=source.path, rule=rule, fix=fix)
            continue
        if not Path(source.path).is_file():
            fix = correct_path(source.path)
            yield Problem(field=field, value=source.path, rule="a file that exists", fix=fix)
        for name in ("subset", "split"):
            value = getattr(source, name)
            if value is not None:
                rule = "has an effect for a Hugging Face data set alone; this is a file"
                yield Problem(field=f"{field}.{name}", value=value, rule=rule, fix="remove it")


def run_directories_can_be_made(run: Run) -> Iterator[Problem]:
    """No file is where the run is to be, and no directory is made on the way to leave it again."""
    path = Path(run.dir)
    for place in (*reversed(path.parents), path):
        if place.exists() and not place.is_dir():
            rule = f"a directory, or one that can be made; {place} is a file"
            yield Problem(field="run.dir", value=run.dir, rule=rule, fix="choose another directory")
        if place.name == ".." and not place.parent.exists():
            rule = f"a directory that can be made; {place.parent}, before .., is not there"
            yield Problem(field="run.dir", value=run.dir, rule=rule, fix=f"write {os.path.normpath(run.dir)}")
            return


def run_directories_are_in_full(run: Run) -> Iterator[Problem]:
    """No directory called ~ is made in place of a home directory."""
    if run.dir.startswith("~"):
        rule = "a path in full: ~ is not read as a home directory"
        yield Problem(field="run.dir", value=run.dir, rule=rule, fix="write the path in full; a shell fills in $HOME")


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
            yield Problem(field=f"{field}.chat_template", value="True", rule="needs a tokenizer", fix=fix)


def one_prompt_source(data: PromptData) -> Iterator[Problem]:
    """Either a file or random prompts; random lengths are in order, and a step has enough prompts."""
    if (data.prompts is None) == (data.random is None):
        given = "neither" if data.prompts is None else "both"
        fix = "give data.prompts, or data.random, and set the other to null"
        yield Problem(field="data", value=given, rule="exactly one of prompts and random is given", fix=fix)
    if data.random is None:
        return
    if data.random.min_tokens > data.random.max_tokens:
        rule = f"at most data.random.max_tokens = {data.random.max_tokens}"
        value, fix = str(data.random.min_tokens), "lower it, or raise data.random.max_tokens"
        yield Problem(field="data.random.min_tokens", value=value, rule=rule, fix=fix)
    if data.random.count < data.prompts_per_step:
        rule = f"at least data.prompts_per_step = {data.prompts_per_step}"
        value, fix = str(data.random.count), "raise it, or lower data.prompts_per_step"
        yield Problem(field="data.random.count", value=value, rule=rule, fix=fix)


def random_prompts_are_ids(data: PromptData, evaluation: Evaluation | None, ptx: PTX | None) -> Iterator[Problem]:
    """Random prompts are neither text nor too long; how other rows are read may still be said."""
    if data.random is None:
        return
    names: list[str] = []
    if evaluation is None:
        names = ["chat_template"] if ptx is not None else ["chat_template", "too_long"]
    yield from unused("data", data, names, "with data.random, and no rows that are read", "or give data.prompts")


def mini_batches_are_equal(algo: Algo, data: PromptData) -> Iterator[Problem]:
    """Every optimizer step has the same number of samples."""
    samples = data.prompts_per_step * data.samples_per_prompt
    if samples % algo.mini_batches:
        yield Problem(
            field="algo.mini_batches",
            value=str(algo.mini_batches),
            rule=f"divides data.prompts_per_step * data.samples_per_prompt = {samples}",
            fix=f"choose a divisor of {samples}",
        )


def selections_fill_mini_batches(raft: RAFT, data: PromptData) -> Iterator[Problem]:
    """Something is selected from, and enough for every optimizer step."""
    samples = data.prompts_per_step * data.samples_per_prompt
    selected = data.prompts_per_step
    if isinstance(raft.strategy, BestOfStep):
        selected = int(raft.strategy.fraction * samples)
    elif data.samples_per_prompt < 2:
        rule = "at least 2 with raft.strategy = local, which selects the best sample of each prompt"
        value = str(data.samples_per_prompt)
        yield Problem(field="data.samples_per_prompt", value=value, rule=rule, fix="set it to 2 or more")
    if raft.mini_batches > selected:
        rule = f"at most {selected}, the samples that are selected in a step"
        value, fix = str(raft.mini_batches), "lower it, or raise data.prompts_per_step"
        yield Problem(field="raft.mini_batches", value=value, rule=rule, fix=fix)


def discarded_ends_have_no_score(raft: RAFT, scores: Scores) -> Iterator[Problem]:
    """What is never selected needs no score."""
    if raft.discard_unfinished and scores.truncate_at is None:
        where = "with raft.discard_unfinished"
        yield from unused("scores", scores, ("missing_end",), where, "or set raft.discard_unfinished to false")


def texts_are_mixed_in(ptx: PTX | None) -> Iterator[Problem]:
    """Texts have a weight, and rollouts beside them."""
    if ptx is None:
        return
    if ptx.coef == 0:
        fix = "raise it, or remove the section: ptx=null"
        yield Problem(field="ptx.coef", value="0", rule="above 0; it has no effect otherwise", fix=fix)
    if ptx.mode == "convex" and ptx.coef >= 1:
        rule = "below 1 with ptx.mode = convex, which weighs the rollouts with the rest"
        yield Problem(field="ptx.coef", value=f"{ptx.coef:g}", rule=rule, fix="lower it, or set ptx.mode to add")


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
            field="rollout.max_model_len",
            value=str(rollout.max_model_len),
            rule=f"covers the longest prompt{longest} and rollout.max_new_tokens = {rollout.max_new_tokens}",
            fix=f"set it to {sum_of} or more, or lower rollout.max_new_tokens",
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
                    field=f"{field}.tokens_per_micro_batch",
                    value=str(role.tokens_per_micro_batch),
                    rule=f"at least {what} = {tokens}",
                    fix=f"set it to {tokens} or more, or shorten the sequences",
                )


def evaluations_have_rows(data: TextData | PairData) -> Iterator[Problem]:
    """Nothing is evaluated without held-out rows."""
    if data.evaluate_every is not None and data.evaluation is None:
        yield Problem(
            field="data.evaluate_every",
            value=str(data.evaluate_every),
            rule="has an effect with data.evaluation alone",
            fix="give data.evaluation, or remove it",
        )


def reference_samples_have_engines(normalisation: Normalisation | None, rollout: Rollout | None) -> Iterator[Problem]:
    """Reference samples are generated, and nothing else is."""
    if normalisation is not None and rollout is None:
        fix = "add the section rollout, or set normalisation to null"
        yield Problem(field="normalisation", value="given", rule="needs the section rollout", fix=fix)
    if normalisation is None and rollout is not None:
        fix = "add the section normalisation, or set rollout to null"
        yield Problem(field="rollout", value="given", rule="has an effect with normalisation alone", fix=fix)


RULES = (
    files_exist,
    run_directories_can_be_made,
    run_directories_are_in_full,
    chat_templates_have_a_tokenizer,
    micro_batches_hold_a_sample,
)
"""Of every stage."""
