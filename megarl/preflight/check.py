"""Checks before a run starts whether models, layouts, data and functions fit together."""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final, get_args
from urllib.parse import urlsplit

from megarl.config import ConfigError, Problem, RolloutTrainingConfig, RunConfig, SamplingConfig
from megarl.config.problems import MASK, masked, shown
from megarl.config.schema import Fault, RowSettings, Tracking
from megarl.config.schema.questions import template_columns
from megarl.data.tokenizer import Tokenizer, model_tokenizer
from megarl.preflight.datasets import DataReader, Sets, scored_prompts
from megarl.preflight.epochs import epoch_problems
from megarl.preflight.models import check_models
from megarl.preflight.template_trial import check_template
from megarl.preflight.user_functions import check_fields, check_functions, check_own_functions, missing_column
from megarl.rollout.requests import stop_token_ids

_WITHOUT_KEY: Final = ("offline", "dryrun", "disabled")
_WANDB_HOSTS: Final = ("api.wandb.ai", "api.forge.coreweave.com")
"""The hosts that wandb (0.31) may ask by default."""


def check(config: RunConfig, *, bare: bool = False) -> Sets:
    """Checks a configuration against its models and data, and returns the data.

    Args:
        bare: whether to accept models with a config.json and no weights.

    Raises:
        ConfigError: with every problem. The configuration may break rules between its fields.
    """
    vocab, problems = check_models(config, bare=bare)
    sets = None
    if vocab is not None:
        sets, found = _read_data(config, vocab)
        problems += found
    problems += _reward_functions(config, sets)
    if isinstance(config, RolloutTrainingConfig) and config.rollout.replay is not None:
        replay = config.rollout.replay
        if not list(Path(replay).glob("*.npz")):
            fix = "name a directory that rollout.record wrote"
            problems.append(Problem("rollout.replay", replay, "holds recorded rollouts", fix))
    problems += check_own_functions(config)
    for field in masked(config.model_dump(mode="json", by_alias=True)):
        rule = "the secret itself: the files of a run do not have it"
        fix = f"set {field}='${{oc.env:NAME}}'"
        problems.append(Problem(field, MASK, rule, fix))
    problems += _trackers(config.tracking)
    if sets is None:
        raise ConfigError(problems, unchecked="Rows of data")
    problems += epoch_problems(config, sets)
    if problems:
        raise ConfigError(problems)
    return sets


def _trackers(tracking: Tracking) -> Iterator[Problem]:
    """Yields the trackers whose packages are missing."""
    packages = {
        "wandb_project": "wandb",
        "mlflow_experiment": "mlflow",
        "trackio_project": "trackio",
    }
    for field, package in packages.items():
        value = getattr(tracking, field)
        if value is not None and find_spec(package) is None:
            fix = f"pip install -e '.[{package}]' in MegaRL's directory, or set it to null"
            yield Problem(f"tracking.{field}", value, f"needs the package {package}", fix)


def check_login(tracking: Tracking) -> None:
    """Raises ConfigError where Weights & Biases would ask for a key; nothing is sent."""
    if tracking.wandb_project is None or _has_wandb_key():
        return
    rule = "needs a key of Weights & Biases: there is none in WANDB_API_KEY, and none of wandb login"
    fix = "run wandb login, or set WANDB_MODE=offline to keep everything in run.dir, or set it to null"
    raise ConfigError([Problem("tracking.wandb_project", tracking.wandb_project, rule, fix)])


def _has_wandb_key() -> bool:
    """Whether wandb finds a key, needs none, or has settings in a file, which may say anything."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    directory = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config/wandb")
    settings = (directory / "settings", Path("wandb/settings"))
    if os.environ.get("WANDB_MODE") in _WITHOUT_KEY or any(file.exists() for file in settings):
        return True
    try:
        keys = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc")
    except (OSError, netrc.NetrcParseError):
        return False
    hosts = _WANDB_HOSTS
    if server := urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc:
        hosts = (server,)
    return any(map(keys.authenticators, hosts))


def _read_data(config: RunConfig, vocab: int) -> tuple[Sets | None, list[Problem]]:
    """Returns the data of the stage, and the problems of the data and its tokenizer."""
    section, rows = config.rows_section
    try:
        tokenizer = _tokenizer(config, vocab, section, rows)
    except ValueError as error:
        fix = "correct its files, or name another tokenizer with model.tokenizer"
        value = shown(config.model.tokenizer or config.model.path)
        return None, [Problem("model.tokenizer", value, str(error), fix)]
    faults = [fault for fault in get_args(Fault) if fault in type(rows).model_fields]
    rules = ", ".join(f"{section}.{fault}" for fault in faults)
    reader = DataReader(
        tokenizer=tokenizer,
        vocab_size=vocab,
        chat_template=rows.chat_template,
        template_arguments=rows.chat_template_kwargs,
        drop=frozenset(rows.drop),
        rules=rules,
    )
    reader.problems += _end_token(config, tokenizer)
    return config.read_sets(reader), reader.problems


def _tokenizer(config: RunConfig, vocab: int, section: str, rows: RowSettings) -> Tokenizer | None:
    """Returns the run's tokenizer, if any; raises ValueError if it does not fit, or is missing."""
    tokenizer = model_tokenizer(config.model)
    if tokenizer is not None:
        arguments = rows.chat_template_kwargs
        tokenizer.check(vocab_size=vocab, chat_template=rows.chat_template, template_arguments=arguments)
        if tokenizer.has_chat_template:
            check_template(tokenizer, arguments)
        return tokenizer
    needed = {
        f"{section}.chat_template": rows.chat_template,
        f"{section}.chat_template_kwargs": rows.chat_template_kwargs,
    }
    if config.engine_settings is not None:
        needed["rollout.stop"] = config.engine_settings.stop
    if isinstance(config, SamplingConfig):
        needed["environment"] = config.environment
    for name, setting in needed.items():
        if setting:
            raise ValueError(f"{name} needs a tokenizer, and the model's directory has none")
    return None


def _end_token(config: RunConfig, tokenizer: Tokenizer | None) -> Iterator[Problem]:
    """Engines must stop at the token with which the tokenizer ends responses."""
    rollout = config.engine_settings
    if rollout is None or rollout.ignore_eos or config.model.path is None:
        return
    try:
        stops = {*stop_token_ids(config.model.path), *rollout.stop_token_ids}
    except (OSError, ValueError) as error:
        rule = f"a directory whose end tokens can be read: {error}"
        fix = "correct or remove the file"
        yield Problem("model.path", config.model.path, rule, fix)
        return
    if tokenizer is None or tokenizer.end_token_id in stops:
        return
    end = tokenizer.end_token_id
    rule = (
        f"the engines stop at {sorted(stops) or 'no token'}, not at the tokenizer's end token, {end},"
        " with which demonstrations and preferred responses end"
    )
    fix = f"add {end}, or correct eos_token_id in the model's generation_config.json"
    yield Problem("rollout.stop_token_ids", shown(rollout.stop_token_ids), rule, fix)


def _reward_functions(config: RunConfig, sets: Sets | None) -> Iterator[Problem]:
    """Checks reward functions against their signatures, and against prompts that could be read."""
    if not isinstance(config, SamplingConfig):
        return
    tokenizer = sets is None or sets.tokenizer is not None
    rows = sets.rows if sets else {}
    longest = config.rollout.max_new_tokens
    for where, functions, prompts in scored_prompts(config, rows):
        problems = check_functions(functions, where=where, tokenizer=tokenizer, longest=longest)
        yield from problems or check_fields(functions, prompts, where=where)
    if config.reward.judge_model is not None:
        prompts = [*rows.get("data.prompts", ()), *rows.get("evaluation.prompts", ())]
        for column in template_columns(config.reward.judge_model.template):
            yield from missing_column("reward.judge_model.template", column, prompts)
