"""Where the run in run.dir resumes, and what forbids a configuration to resume it. Nothing here writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import yaml

from megarl.config import ConfigError, Problem, RunConfig, TrainingConfig, plain
from megarl.config.problems import shown
from megarl.run.checkpoints import BrokenCheckpointError, Checkpoint, Checkpoints
from megarl.run.frozen_weights import FROZEN, FrozenDigests, changed_files, digest_frozen_weights
from megarl.run.paths import RunPaths, field_at, is_locked, read_config

CHOOSE_ANOTHER: Final = "choose another run.dir"

_WEIGHTS = "the checkpoints have its weights"
_STREAM = "the checkpoints have the position in this data"
_HEAD = "another one changes the meaning of its scores"
_DATA = ("prompts", "random", "train", "chat_template", "max_tokens", "too_long", "empty", "equal")

_ADAPTERS = "the checkpoints have the adapters"
_LORA = ("rank", "alpha", "rslora", "targets", "init", "seed", "path")

FIXED: Final[Mapping[str, str]] = {
    **{f"model.{field}": _WEIGHTS for field in ("path", "random", "vocab_size", "tokenizer")},
    "run.seed": "the order of the data and the seeds of the samples depend on it",
    **{f"data.{field}": _STREAM for field in _DATA},
    **{f"critic.{field}": _WEIGHTS for field in ("path", "head", "head_std", "head_seed")},
    "critic.value_norm": "the critic's values are scaled by its moments, which are in the checkpoints",
    **{f"reward.{field}": _HEAD for field in ("path", "head_std", "head_seed")},
    **{f"reference.{field}": "the run learns from it" for field in ("path", "teachers", "column")},
    "normalisation.before": "it scales the head before the first step",
    **{f"{role}.lora.{field}": _ADAPTERS for role in ("actor", "critic", "reward") for field in _LORA},
    "actor.ema": "the checkpoints have the moving average",
    "algo.kl": "the checkpoints have the state of its controller, and of a reference that follows the actor",
    **{f"ptx.{field}": _STREAM for field in ("data", "max_tokens", "loss_on", "chat_template")},
}
"""Fields and whole sections that cannot change when a run resumes, and why. Other changes apply from the next step."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where a run continues.

    Args:
        latest: newest checkpoint; None if the run starts again from the beginning.
        finished: whether all steps are taken and the model is exported.
        changed: whether the configuration differs from that of the start.
    """

    latest: Checkpoint | None
    finished: bool
    changed: bool


def find_resume_point(
    config: TrainingConfig, paths: RunPaths, checkpoints: Checkpoints, frozen: FrozenDigests
) -> ResumePoint | None:
    """Returns where the run in run.dir continues; None if there is no run.

    Args:
        frozen: digests of the weights that exist now.

    Raises:
        ConfigError: the configuration, the frozen weights or a damaged checkpoint forbid it.
    """
    if not paths.config.exists():
        return None
    try:
        latest = checkpoints.latest()
    except BrokenCheckpointError as error:
        fix = f"restore its files, or remove {error.directory} to resume from the checkpoint before it"
        raise run_dir_error(config, f"{error}", fix) from None
    problems, changed = compare_configs(read_config(paths.config), config, latest)
    if latest is not None:
        problems += _changed_weights(config, latest.state.get(FROZEN, {}), frozen)
    if problems:
        raise ConfigError(problems)
    if paths.finished and latest is None:  # a new start would remove its export
        rule = "has a checkpoint: the run is finished, and there is nothing to resume from"
        raise run_dir_error(config, rule, CHOOSE_ANOTHER)
    finished = paths.finished and latest is not None and latest.step == config.steps
    return ResumePoint(latest=latest, finished=finished, changed=changed)


def resumed_config(config: RunConfig) -> Mapping[str, Any]:
    """Returns the configuration of the run in run.dir that this one resumes; none if it starts at the beginning."""
    if not isinstance(config, TrainingConfig):
        return {}
    paths = RunPaths(config.run.dir)
    if not Checkpoints(paths.checkpoint_dir).steps():
        return {}
    return read_config(paths.config)


def describe_run(config: RunConfig) -> str | None:
    """Describes what a start would find in run.dir; None if there is no run. Raises ConfigError as the start would."""
    paths = RunPaths(config.run.dir)
    if is_locked(paths.lock):
        raise locked_error(config)
    if not isinstance(config, TrainingConfig):
        refuse_other_runs(config, paths)
        return None
    checkpoints = Checkpoints(paths.checkpoint_dir)
    point = find_resume_point(config, paths, checkpoints, digest_frozen_weights(config))
    if point is None:
        return None
    if point.finished:
        return finished_message(config)
    if point.latest is None:
        return "from the beginning: there is no checkpoint yet"
    return f"after step {point.latest.step}"


def finished_message(config: TrainingConfig) -> str:
    state = f"{config.run.dir} is finished: it has taken its {config.steps} steps."
    return f"{state} Raise {config.run.length_field} to continue it, or {CHOOSE_ANOTHER} for a new run."


def refuse_other_runs(config: RunConfig, paths: RunPaths) -> None:
    """Raises ConfigError if run.dir has anything but an interrupted evaluation."""
    is_evaluation = read_config(paths.config).get("stage") == config.stage
    if paths.config.exists() and (paths.finished or not is_evaluation):
        there = "a finished evaluation" if is_evaluation else "a training run"
        fix = f"{CHOOSE_ANOTHER}, or remove the directory"
        raise run_dir_error(config, f"has nothing that would be lost; it has {there}", fix)


def run_dir_error(config: RunConfig, rule: str, fix: str) -> ConfigError:
    return ConfigError([Problem(field="run.dir", value=config.run.dir, rule=rule, fix=fix)])


def locked_error(config: RunConfig) -> ConfigError:
    return run_dir_error(config, "is run by one process at a time", f"wait for the other process, or {CHOOSE_ANOTHER}")


def compare_configs(
    old: Mapping[str, Any], config: TrainingConfig, latest: Checkpoint | None
) -> tuple[list[Problem], bool]:
    """Compares a configuration with that of the start; returns what forbids a resume, and whether anything differs."""
    new = yaml.safe_load(yaml.safe_dump(plain(config)))
    fix = "put it back, or start a new run in another run.dir"
    stage = old.get("stage", "(missing)")
    if stage != config.stage:  # other differences follow from it
        rule = f"stays {stage} when a run resumes: a run has one stage"
        return [Problem(field="stage", value=config.stage, rule=rule, fix=fix)], True
    problems: list[Problem] = []
    for name, why in FIXED.items():
        before = field_at(old, name)  # a field that is newer than the run is null
        after = field_at(new, name)
        for field, kept, given in _differences(name, before, after):
            rule = f"stays {kept} when a run resumes: {why}"
            problems.append(Problem(field=field, value=given, rule=rule, fix=fix))
    if latest is not None:
        problems += _contradictions(config, latest)
    return problems, old != new


def _contradictions(config: TrainingConfig, latest: Checkpoint) -> Iterator[Problem]:
    saved = sorted(config.saved)
    if saved != sorted(latest.roles):
        rule = f"the roles with saved weights are {', '.join(sorted(latest.roles))}, as in its latest checkpoint"
        fix = "place the same roles, or start a new run in another run.dir"
        yield Problem(field="groups", value=", ".join(saved), rule=rule, fix=fix)
    if config.steps < latest.step:
        rule = f"at least the {latest.step} steps that the run has taken"
        yield Problem(field="run.steps", value=str(config.steps), rule=rule, fix=f"raise {config.run.length_field}")


def _changed_weights(config: TrainingConfig, kept: FrozenDigests, now: FrozenDigests) -> Iterator[Problem]:
    for field, files in changed_files(kept, now).items():
        rule = f"has the files that the run was started with; {', '.join(files)} changed, which a frozen role loads"
        fix = "restore these files, or start a new run in another run.dir"
        value = str(field_at(config.model_dump(), field))
        yield Problem(field=field, value=value, rule=rule, fix=fix)


def _differences(field: str, kept: Any, given: Any) -> Iterator[tuple[str, str, str]]:
    """Yields the fields below one whose values differ, with both values; what one side lacks is null."""
    if isinstance(kept, Mapping) and isinstance(given, Mapping):
        before = cast(Mapping[str, Any], kept)
        after = cast(Mapping[str, Any], given)
        for key in sorted(before.keys() | after.keys()):
            yield from _differences(f"{field}.{key}", before.get(key), after.get(key))
    elif kept != given and not (kept is None and given == {}):  # a mapping newer than the run, and unset
        yield field, shown(kept), shown(given)
