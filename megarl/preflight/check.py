"""Checks a run before it starts: whether models, layouts, data and reward functions fit together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from megarl.config import (
    ConfigError,
    EvalConfig,
    PPOConfig,
    Problem,
    RAFTConfig,
    RewardModelConfig,
    RunConfig,
    SFTConfig,
)
from megarl.config.problems import shown
from megarl.config.schema import Fault, HeldOut, PairData, PromptData, TextData
from megarl.data.tokenizer import Tokenizer, model_tokenizer
from megarl.preflight.datasets import (
    DataReader,
    PairSets,
    PromptSets,
    TextSets,
    read_held_out,
    read_pair_sets,
    read_prompt_sets,
    read_text_sets,
)
from megarl.preflight.models import check_models, stated_vocab_size, vocab_size
from megarl.preflight.user_functions import check_fields, check_functions, check_own_functions
from megarl.rollout.requests import stop_token_ids
from megarl.run.trackers import has_wandb

Sets = PromptSets | TextSets | PairSets
StageConfig = SFTConfig | RewardModelConfig | PPOConfig | RAFTConfig | EvalConfig


def check(config: RunConfig) -> Sets:
    """Checks a configuration against its models and data, and returns the data.

    Raises:
        ConfigError: it has every problem, also of a configuration that breaks rules between its fields.
    """
    spec, problems = check_models(config)
    vocab = vocab_size(config, spec) if spec is not None else stated_vocab_size(config)
    sets = None
    if vocab is not None:
        sets, found = _read_data(config, vocab)
        problems += found
    problems += _reward_functions(config, sets)
    if isinstance(config, PPOConfig | RAFTConfig):
        problems += _replay(config)
    problems += check_own_functions(config)
    if config.tracking.wandb_project is not None and not has_wandb():
        field, value = "tracking.wandb_project", config.tracking.wandb_project
        fix = "install it with pip install 'megarl[wandb]', or set it to null"
        problems.append(Problem(field=field, value=value, rule="needs the package wandb", fix=fix))
    if problems:
        raise ConfigError(problems, unchecked="" if sets is not None else "Rows of data")
    assert sets is not None
    return sets


def _read_data(config: RunConfig, vocab: int) -> tuple[Sets | None, list[Problem]]:
    """The data of the stage, and the problems of the data and its tokenizer."""
    assert isinstance(config, StageConfig)
    section, rows = ("evaluation", config.evaluation) if isinstance(config, EvalConfig) else ("data", config.data)
    try:
        tokenizer = _tokenizer(config, vocab, section, rows)
    except ValueError as error:
        fix = "name the tokenizer of the model with model.tokenizer"
        field, value = "model.tokenizer", shown(config.model.tokenizer or config.model.path)
        return None, [Problem(field=field, value=value, rule=str(error), fix=fix)]
    rules = [f"{section}.{fault}" for fault in get_args(Fault) if fault in type(rows).model_fields]
    reader = DataReader(tokenizer, vocab, chat_template=rows.chat_template, drop=rows.drop, rules=rules)
    reader.problems += _end_token(config, tokenizer)
    match config:
        case EvalConfig():
            sets = read_held_out(config, reader)
        case PPOConfig() | RAFTConfig():
            sets = read_prompt_sets(config, reader, vocab)
        case SFTConfig():
            sets = read_text_sets(config, reader)
        case RewardModelConfig():
            sets = read_pair_sets(config, reader)
    return sets, reader.problems


def _tokenizer(
    config: StageConfig, vocab: int, section: str, rows: TextData | PairData | PromptData | HeldOut
) -> Tokenizer | None:
    """The run's tokenizer, if there is one.

    Raises:
        ValueError: it does not fit the model, or it is missing and needed.
    """
    tokenizer = model_tokenizer(config.model)
    if tokenizer is not None:
        tokenizer.check(vocab_size=vocab, chat_template=rows.chat_template)
        return tokenizer
    stop = () if isinstance(config, SFTConfig) or config.rollout is None else config.rollout.stop
    for name, needed in (("rollout.stop", bool(stop)), (f"{section}.chat_template", rows.chat_template)):
        if needed:
            raise ValueError(f"{name} needs a tokenizer, and the model's directory has none")
    return None


def _end_token(config: StageConfig, tokenizer: Tokenizer | None) -> Iterator[Problem]:
    """Engines stop at the token with which the tokenizer ends responses."""
    rollout = None if isinstance(config, SFTConfig) else config.rollout
    if rollout is None or tokenizer is None or config.model.path is None:
        return
    stops = {*stop_token_ids(config.model.path), *rollout.stop_token_ids}
    if tokenizer.end_token_id not in stops:
        yield Problem(
            field="rollout.stop_token_ids",
            value=shown(list(rollout.stop_token_ids)),
            rule=f"the engines stop at {sorted(stops) or 'no token'}, not at the tokenizer's end token, "
            f"{tokenizer.end_token_id}, with which demonstrations and preferred responses end",
            fix=f"add {tokenizer.end_token_id}, or correct eos_token_id in the model's generation_config.json",
        )


def _reward_functions(config: RunConfig, sets: Sets | None) -> Iterator[Problem]:
    """The reward functions, against their signatures and against the prompts, if these could be read."""
    if not isinstance(config, PPOConfig | RAFTConfig | EvalConfig):
        return
    read = sets if isinstance(sets, PromptSets) else None
    named = [("reward.functions", config.reward.functions, () if read is None else read.train)]
    if config.evaluation is not None:
        functions = config.evaluation.functions
        named.append(("evaluation.functions", functions, () if read is None else read.held_out))
    for where, functions, prompts in named:
        wrong = check_functions(
            functions,
            where=where,
            tokenizer=read is None or read.tokenizer is not None,
            longest=config.rollout.max_new_tokens,
        )
        yield from wrong or check_fields(functions, prompts, where=where)


def _replay(config: PPOConfig | RAFTConfig) -> Iterator[Problem]:
    replay = config.rollout.replay
    if replay is not None and not list(Path(replay).glob("*.npz")):
        fix = "name a directory that rollout.record wrote"
        yield Problem(field="rollout.replay", value=replay, rule="holds recorded rollouts", fix=fix)
