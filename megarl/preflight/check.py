"""What can be known of a run before anything starts: whether its models, layouts, data and rewards fit together."""

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
from megarl.preflight.functions import check_fields, check_functions, check_own_functions
from megarl.preflight.models import check_models, stated_vocab_size, vocab_size
from megarl.rollout.requests import stop_token_ids
from megarl.run.trackers import has_wandb

Sets = PromptSets | TextSets | PairSets
StageConfig = SFTConfig | RewardModelConfig | PPOConfig | RAFTConfig | EvalConfig


def check(config: RunConfig) -> Sets:
    """Checks a configuration against its models and its data, which is read on the way.

    Returns:
        The data.

    Raises:
        ConfigError: the run could not be, of a configuration that may break rules between its fields as well; every
            problem is listed.
    """
    sets, problems = _examine(config)
    if problems:
        raise ConfigError(problems, unchecked="" if sets is not None else "Rows of data")
    assert sets is not None
    return sets


def _examine(config: RunConfig) -> tuple[Sets | None, list[Problem]]:
    """The data, where it can be read, and all problems."""
    spec, found = check_models(config)
    vocab = vocab_size(config, spec) if spec is not None else stated_vocab_size(config)
    sets = None
    if vocab is not None:
        sets, of_data = _data(config, vocab)
        found += of_data
    found += _functions(config, sets)
    if isinstance(config, PPOConfig | RAFTConfig):
        found += _replay(config)
    found += check_own_functions(config)
    if config.tracking.wandb_project is not None and not has_wandb():
        field, value = "tracking.wandb_project", config.tracking.wandb_project
        fix = "install it with pip install 'megarl[wandb]', or set it to null"
        found.append(Problem(field=field, value=value, rule="needs the package wandb", fix=fix))
    return sets, found


def _data(config: RunConfig, vocab: int) -> tuple[Sets | None, list[Problem]]:
    """The data of the stage, and what is wrong with it and its tokenizer."""
    assert isinstance(config, StageConfig)
    try:
        tokenizer = _tokenizer(config, vocab)
    except ValueError as error:
        fix = "name the tokenizer of the model with model.tokenizer"
        field, value = "model.tokenizer", shown(config.model.tokenizer or config.model.path)
        return None, [Problem(field=field, value=value, rule=str(error), fix=fix)]
    section, rows = _rows(config)
    rules = [f"{section}.{fault}" for fault in get_args(Fault) if fault in type(rows).model_fields]
    reader = DataReader(tokenizer, vocab, chat_template=rows.chat_template, drop=rows.drop, rules=rules)
    ends = list(_ends(config, tokenizer))
    if isinstance(config, PPOConfig | RAFTConfig | EvalConfig):
        read_by_itself = isinstance(config, EvalConfig)
        sets = read_held_out(config, reader) if read_by_itself else read_prompt_sets(config, reader, vocab)
        return sets, [*ends, *reader.problems]
    sets = read_text_sets(config, reader) if isinstance(config, SFTConfig) else read_pair_sets(config, reader)
    return sets, [*ends, *reader.problems]


def _rows(config: StageConfig) -> tuple[str, TextData | PairData | PromptData | HeldOut]:
    """The section that says how rows are read, and its name."""
    return ("evaluation", config.evaluation) if isinstance(config, EvalConfig) else ("data", config.data)


def _tokenizer(config: StageConfig, vocab: int) -> Tokenizer | None:
    """The run's tokenizer, if there is one.

    Raises:
        ValueError: it does not fit the model, or there is none and something needs one.
    """
    tokenizer, (section, rows) = model_tokenizer(config.model), _rows(config)
    if tokenizer is not None:
        tokenizer.check(vocab_size=vocab, chat_template=rows.chat_template)
        return tokenizer
    stop = () if isinstance(config, SFTConfig) or config.rollout is None else config.rollout.stop
    for name, needed in (("rollout.stop", bool(stop)), (f"{section}.chat_template", rows.chat_template)):
        if needed:
            raise ValueError(f"{name} needs a tokenizer, and the model's directory has none")
    return None


def _ends(config: StageConfig, tokenizer: Tokenizer | None) -> Iterator[Problem]:
    """Where responses are generated, the engines stop at the token with which the tokenizer ends a response."""
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


def _functions(config: RunConfig, sets: Sets | None) -> Iterator[Problem]:
    """The reward functions, against their own signatures and the prompts that they will see, where these are read."""
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
